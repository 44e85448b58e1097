/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * What the number of a process is good for: only processes of one pid namespace mean the same by
 * it.
 */
#ifndef BL_PROCESS_H
#define BL_PROCESS_H

#include <stdint.h>
#include <sys/stat.h>

/* The namespace that this process's number is of; 0: it cannot be told. */
static inline uint64_t bl_pid_namespace(void)
{
    struct stat found;
    return stat("/proc/self/ns/pid", &found) == 0 ? (uint64_t)found.st_ino : 0;
}

#endif
