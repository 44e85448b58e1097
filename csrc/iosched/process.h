/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The pid namespace of this process: pids are comparable only within a namespace.
 */
#ifndef BL_PROCESS_H
#define BL_PROCESS_H

#include <stdint.h>
#include <sys/stat.h>

/* Returns the inode of this process's pid namespace, or 0 if it is unknown. */
static inline uint64_t bl_pid_namespace(void)
{
    struct stat found;
    return stat("/proc/self/ns/pid", &found) == 0 ? (uint64_t)found.st_ino : 0;
}

#endif
