/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Random bits from the kernel: by getrandom(), or, where a sandbox denies that, from /dev/urandom.
 */
#ifndef BL_RANDOM_H
#define BL_RANDOM_H

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <sys/random.h>
#include <unistd.h>

/* Fill size bytes, at most 256 (getrandom() may return larger requests in parts). Returns 0 or
 * -errno. */
static inline int bl_random(void *bits, size_t size)
{
    if (getrandom(bits, size, 0) == (ssize_t)size)
        return 0;
    int descriptor = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (descriptor < 0)
        return -errno;
    ssize_t count = read(descriptor, bits, size);
    int status = count == (ssize_t)size ? 0 : count < 0 ? -errno : -EIO;
    close(descriptor);
    return status;
}

#endif
