/* Memory for what ranks compute: a region for each rank, mapped by all of them before they are forked.

Invariants
----------
* A block of a region has all its pages before anybody gets it: too little memory is a refusal, never a SIGBUS.
* A rank allocates in its own region alone, and only while it is the process that has taken this region. In any other
  process, such as a child that the user forks, allocating is malloc's, and freeing a block changes nothing for others.
* Nothing is written into a block: what is known of blocks lies in memory that no other process sees.
* Blocks that malloc gave, where a region could not, are told apart by their addresses.
*/
#ifndef SYNKHRONOS_REGIONS_H
#define SYNKHRONOS_REGIONS_H

#include <stddef.h>
#include <stdint.h>

#define REGIONS_PAGE ((size_t)4096)
#define REGIONS_SMALLEST (4 * REGIONS_PAGE) /* smaller blocks are malloc's */
#define REGIONS_HUGE ((size_t)2 << 20)      /* a huge page; the size of a region is a multiple */

struct regions;

/* Bytes of one rank: in blocks that somebody has, in freed blocks that are kept, and the most that was in use. */
struct regions_count {
    uint64_t in_use, kept, largest;
};

/* Map n_ranks regions of `size` bytes over the file `fd`, which is taken over, or private ones if it is -1; the caller
takes that of `rank`. NULL and errno if the kernel refuses. */
struct regions *regions_create(int fd, int n_ranks, int rank, size_t size, size_t keep);
/* Take another region over, in a worker that was just forked: it is empty from then on. */
void regions_take(struct regions *all, int rank);
/* The other ranks are no more: what they have goes back to the system. No block is given any more, and what is freed goes
back, too. */
void regions_close(struct regions *all);
/* Unmap everything. */
void regions_destroy(struct regions *all);

void *regions_malloc(struct regions *all, size_t n_bytes);
void *regions_calloc(struct regions *all, size_t n, size_t n_bytes);
void *regions_realloc(struct regions *all, void *block, size_t n_bytes);
void regions_free(struct regions *all, void *block);

/* A command is executed from now on. */
void regions_begin_command(struct regions *all);
/* It has been; give back what none of the last ones has used. What is kept goes back, too, some seconds after it. */
void regions_end_command(struct regions *all);
/* Give back all that is kept. */
void regions_trim(struct regions *all);
/* How many bytes more may be taken from the system, beside what is kept. */
void regions_allow(struct regions *all, size_t n_bytes);
/* Whether so much of that has been taken that it should be looked at again. */
int regions_short(struct regions *all);

/* Where bytes lie, counted from the first region, which begins at the same address in every rank; -1: elsewhere, or not
in memory that ranks share. */
ptrdiff_t regions_offset(const struct regions *all, const void *first, size_t n_bytes);
char *regions_base(const struct regions *all);
size_t regions_n_bytes(const struct regions *all);
int regions_n_ranks(const struct regions *all);
int regions_are_shared(const struct regions *all);
struct regions_count regions_count(const struct regions *all, int rank);

/* What this thread forks from now on is a rank, which shares these regions (NULL: there are none). */
void regions_fork_ranks(struct regions *all);
void regions_fork_no_ranks(void);
/* Before a fork that is not of a rank: copy the live blocks, for the child to find them as they are now. Returns the bytes
that memory was too short for: a child that touches these blocks ends by SIGSEGV. */
size_t regions_before_fork(void);
/* After it, in the parent. */
void regions_after_fork(void);

#endif
