/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Streaming copies by address, for each instruction set, chosen once (copy.c).
 */
#ifndef BL_COPY_H
#define BL_COPY_H

#include <stddef.h>

/* Whole lines by non-temporal stores. target is line-aligned, size a multiple of a line, source
 * of any alignment. No fence: the caller's next bl_fence_store covers it. */
void bl_copy_stream(void *target, const void *source, size_t size);

#endif
