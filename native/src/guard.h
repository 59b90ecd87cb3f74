/* What happens when a segment is cut short under its mapping. Internal to native/src. */
#ifndef SHMRING_GUARD_H
#define SHMRING_GUARD_H

#include <stddef.h>
#include <stdint.h>

/* A page of a mapping that its object no longer has is SIGBUS at the first touch, whoever touches it
 * and however harmlessly. For mappings known here the signal is caught: the whole mapping is replaced
 * by zeros, which no segment is, so that the next look at it is an error and not the end of the
 * process. Elsewhere, and when the table is full, SIGBUS is what it was. */
void shr_guard_add(void *base, size_t length, int writable);
/* Before it is unmapped. */
void shr_guard_remove(const void *base);
/* 0 if the object is shorter than it was when it was mapped: nobody at its other end may ever touch a
 * page that is gone, and would wait for ever. One system call. */
int shr_guard_is_whole(int fd, uint64_t capacity);

#endif
