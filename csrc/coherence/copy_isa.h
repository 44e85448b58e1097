/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The streaming copy of whole lines, by the widest instructions of the CPU.
 */
#ifndef BL_COPY_ISA_H
#define BL_COPY_ISA_H

#include <stddef.h>

/* Copy whole lines by non-temporal stores. target is line-aligned, size is a multiple of a line,
 * source has any alignment. It does not fence: bl_streamed (coherence/instructions.h) and a store
 * fence must follow before other hosts can read the bytes. */
void bl_copy_stream(void *target, const void *source, size_t size);

#endif
