/* File descriptors that the library owns.

A program may close descriptors that it did not open (`os.closerange`, as daemons do), or put other files in their places
(`dup2`). So a descriptor is kept with the device and the inode of its file, and is compared before each use. Memory
files, sockets, pipes and files on disk have an inode each; anonymous inodes (of `eventfd`, `epoll`, and of `pidfd` before
Linux 6.9) are one for all, and must not be owned like this. Another thread may still replace the file between the
comparison and the use. */
#ifndef SYNKHRONOS_DESCRIPTORS_H
#define SYNKHRONOS_DESCRIPTORS_H

#include <sys/stat.h>
#include <unistd.h>

struct descriptor {
    int fd; /* -1: none */
    dev_t device;
    ino_t inode;
};

/* Own a descriptor; returns 0, and sets errno, if it is not open. */
static inline int descriptor_own(struct descriptor *one, int fd)
{
    struct stat file;
    if (fstat(fd, &file) != 0)
        return 0;
    *one = (struct descriptor){fd, file.st_dev, file.st_ino};
    return 1;
}

/* The descriptor; -1 if there is none, or another file has its number. */
static inline int descriptor_number(const struct descriptor *one)
{
    struct stat file;
    int is_own = one->fd >= 0 && fstat(one->fd, &file) == 0 && file.st_dev == one->device && file.st_ino == one->inode;
    return is_own ? one->fd : -1;
}

/* Close it, unless another file has its number. */
static inline void descriptor_close(struct descriptor *one)
{
    int fd = descriptor_number(one);
    one->fd = -1;
    if (fd >= 0)
        close(fd);
}

#endif
