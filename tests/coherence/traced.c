/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Executes the verbs' instructions and prints which ones they were, and on which addresses.
 * test_instructions.py compiles it with a copy of csrc/coherence in which each instruction is
 * preceded by a call of traced().
 */
#define _GNU_SOURCE
#include <stdint.h>

void traced(const char *instruction, const volatile void *address);

#include "coherence/coherence.h"

#include "coherence/x86_cpu.c"
#include "coherence/aarch64_cpu.c"
#include "coherence/cpu.c"
#include "coherence/x86_crc32c.c"
#include "coherence/x86_crc32c_wide.c"
#include "coherence/aarch64_crc32c.c"
#include "coherence/crc32c.c"
#include "coherence/x86_copy.c"
#include "coherence/aarch64_copy.c"
#include "coherence/copy.c"
#include "coherence/primitives.c"

#include <stdio.h>
#include <stdlib.h>

static const uint8_t *pool_start;

/* Print an instruction and the offset of its operand. */
void traced(const char *instruction, const volatile void *address)
{
    printf(" %s", instruction);
    if (address != NULL)
        printf("@%ld", (long)((const volatile uint8_t *)address - pool_start));
}

#define SCENE(name, call)                                                                          \
    do {                                                                                           \
        printf("\n" name ":");                                                                     \
        call;                                                                                      \
    } while (0)

static void scenes(bl_memory *memory, const uint8_t *bytes)
{
    uint8_t back[BL_LINE_SIZE];
    uint32_t crc = 0;
    SCENE("stream_line", bl_stream_line(memory, 64, bytes));
    SCENE("publish_line", bl_publish_line(memory, 64, bytes));
    SCENE("load_line", bl_load_line(memory, 64, back));
    printf("\ncontents: %d", memcmp(back, bytes, sizeof back));
    SCENE("stream", bl_stream(memory, 64, bytes, 2 * BL_LINE_SIZE));
    printf("\nstream_crc:");
    crc = bl_stream_crc(memory, 0, bytes, 4 * BL_LINE_SIZE, 0);
    printf("\nsum: %d", crc == bl_crc32c(0, bytes, 4 * BL_LINE_SIZE));
    SCENE("refetch", bl_refetch(memory, 64, 2 * BL_LINE_SIZE));
    SCENE("ragged", bl_invalidate(memory, 70, 60));
    SCENE("fence_store", bl_fence_store(memory));
    SCENE("fence_full", bl_fence_full(memory));
    SCENE("settle", bl_copy_settle());
    SCENE("write_back", bl_flush(bl_address(memory, 64), BL_LINE_SIZE));
    SCENE("drop", bl_drop(bl_address(memory, 70), 1));
    SCENE("ntstore_copy", bl_ntstore_copy(bl_address(memory, 60), bytes, 72));
#ifdef __aarch64__
    SCENE("small cache lines", bl_flush_lines(bl_address(memory, 64), 64, 32));
    printf("\nfaults: %d %d %d %d", bl_flush_fault_of(0x8444c004), bl_flush_fault_of(0x8445c004),
           bl_flush_fault_of(0x8544c004), bl_flush_fault_of(0x80038003));
    printf("\nsizes: %u %u", bl_cache_line_size(0x80038003), bl_cache_line_size(0x8444c004));
#endif
}

int main(void)
{
    static uint8_t bytes[4 * BL_LINE_SIZE];
    static bl_memory memory;
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)(i * 7 + 1);
    memory.map = bl_interleave_one(4 * BL_STRIPE_SIZE);
    memory.base[0] = aligned_alloc(BL_PAGE_SIZE, 4 * BL_STRIPE_SIZE);
    if (memory.base[0] == NULL)
        return 1;
    pool_start = bl_address(&memory, 0);
    bl_cpu_limit(BL_CPU_CLFLUSHOPT | BL_CPU_CLWB | BL_CPU_NEON | BL_CPU_CRC32);
    memory.flush_choice = bl_flush_choice(bl_cpu_features());
    scenes(&memory, bytes);
    memory.coherent[0] = 1;
    printf("\ncoherent:");
    bl_publish_line(&memory, 64, bytes);
    bl_refetch(&memory, 64, 64);
    SCENE("coherent stream", bl_stream(&memory, 64, bytes, BL_LINE_SIZE));
    printf("\n");
    return 0;
}
