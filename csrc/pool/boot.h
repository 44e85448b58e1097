/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Boot ids, which identify a start of an operating system.
 */
#ifndef BL_BOOT_H
#define BL_BOOT_H

#include <stdint.h>

/* Return 1 if both identify the same start of the same operating system. */
static inline int bl_boot_same(const uint64_t one[2], const uint64_t other[2])
{
    return one[0] == other[0] && one[1] == other[1];
}

#endif
