/* Pages of the file of the regions: had before they are used, given back. */
#include "heap_internal.h"
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif
#define PIECE ((size_t)2 << 20) /* of a reservation, which signals make the kernel begin with again */

/* Have the kernel put huge pages, which are quicker to find, to map and to use, where there are none yet. It does so for
memory in files only where there is a page already, and if asked like this whatever its settings are for all programs. */
static void ask_for_huge_pages(const struct regions *all, int fd, char *first, size_t n_bytes)
{
    size_t n_huge = n_bytes / REGIONS_HUGE;
    if ((uintptr_t)first % REGIONS_HUGE != 0 || n_huge == 0)
        return;
    for (size_t i = 0; i < n_huge; i++)
        if (fallocate(fd, 0, first - (char *)all->counts + (off_t)(i * REGIONS_HUGE), REGIONS_PAGE) != 0)
            return;
    madvise(first, n_huge * REGIONS_HUGE, MADV_COLLAPSE);
}

/* Have the kernel find pages. By the descriptor every Linux can; where a sandbox refuses that, or the program has closed
it, Linux from 5.14 on can by the addresses, page table by page table. */
int regions_reserve(const struct regions *all, char *first, size_t n_bytes)
{
    if (!all->is_shared)
        return 1;
    int fd = descriptor_number(&all->file);
    ask_for_huge_pages(all, fd, first, n_bytes);
    while (n_bytes > 0) {
        size_t piece = n_bytes < PIECE ? n_bytes : PIECE;
        if (fallocate(fd, 0, first - (char *)all->counts, (off_t)piece) == 0) {
            first += piece;
            n_bytes -= piece;
        } else if (errno == ENOSPC || errno == ENOMEM) {
            return 0;
        } else if (errno != EINTR) {
            return madvise(first, n_bytes, MADV_POPULATE_WRITE) == 0;
        }
    }
    return 1;
}

/* Give pages back; they are zeros when they are used again. */
int regions_punch(const struct regions *all, size_t start, size_t n_bytes)
{
    return madvise(own_base(all) + start, n_bytes, all->is_shared ? MADV_REMOVE : MADV_DONTNEED) == 0;
}
