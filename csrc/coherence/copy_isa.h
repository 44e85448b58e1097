/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Streaming copies of whole lines, one for each instruction set. target is line-aligned, source has
 * any alignment, and size is a multiple of a line. The caller has checked that the CPU has the
 * instructions.
 */
#ifndef BL_COPY_ISA_H
#define BL_COPY_ISA_H

#include <stddef.h>
#include <stdint.h>

void bl_copy_sse2(uint8_t *target, const uint8_t *source, size_t size);
void bl_copy_avx2(uint8_t *target, const uint8_t *source, size_t size);
void bl_copy_avx512(uint8_t *target, const uint8_t *source, size_t size);
void bl_copy_movdir64b(uint8_t *target, const uint8_t *source, size_t size);

#endif
