/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The minimum and the maximum of two numbers.
 */
#ifndef BL_MINMAX_H
#define BL_MINMAX_H

#include <stdint.h>

static inline uint64_t bl_min(uint64_t a, uint64_t b) { return a < b ? a : b; }

static inline uint64_t bl_max(uint64_t a, uint64_t b) { return a > b ? a : b; }

#endif
