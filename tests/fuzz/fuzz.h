/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The frame of a fuzzer: the whole C core, compiled with sanitizers over a pool in private memory,
 * in which lines change between two loads. After every load of a line or of bytes the input may
 * change a byte of the region that another process could write at that moment.
 *
 * A target (server.c, client.c, successor.c) defines the region, and what must still be true.
 */
#ifndef BL_FUZZ_H
#define BL_FUZZ_H

#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/pool_format.h"
#include "api/index.h"
#include "coherence/coherence.h"

static void fuzz_interfere(const bl_memory *memory);

/* A macro is not expanded in its own body: each one is the verb, followed by the step of another
 * process. */
#define bl_load_line(memory, offset, line)                                                         \
    (bl_load_line(memory, offset, line), fuzz_interfere(memory))
#define bl_fetch(memory, offset, target, size)                                                     \
    (bl_fetch(memory, offset, target, size), fuzz_interfere(memory))

#include "beluga.c"

/* ---- The input is read once, front to back; it gives zeros when it is used up. */

static const uint8_t *fuzz_next;
static size_t fuzz_left;

static uint8_t fuzz_byte(void)
{
    if (fuzz_left == 0)
        return 0;
    fuzz_left--;
    return *fuzz_next++;
}

static void fuzz_bytes(void *target, size_t size)
{
    uint8_t *byte = target;
    for (size_t i = 0; i < size; i++)
        byte[i] = fuzz_byte();
}

/* Return a number that is often small, sometimes at a boundary, sometimes arbitrary. */
static uint32_t fuzz_number(void)
{
    static const uint32_t edges[] = {0, 1, 0xff, 0xffff, 0x10000, 0x7fffffff, 0x80000000,
                                     0xffffffff};
    uint8_t kind = fuzz_byte();
    uint32_t any;
    if (kind < 128)
        return kind % 40;
    if (kind < 192)
        return edges[kind % 8];
    fuzz_bytes(&any, sizeof any);
    return any;
}

/* ---- The region: bytes that another process may change at any time. */

static uint64_t region_start, region_size;

static void fuzz_scribble(const bl_memory *memory)
{
    uint16_t where;
    fuzz_bytes(&where, sizeof where);
    *bl_address(memory, region_start + where % region_size) = fuzz_byte();
}

static void fuzz_interfere(const bl_memory *memory)
{
    if (region_size > 0 && fuzz_left > 4 && fuzz_byte() < 32)
        fuzz_scribble(memory);
}

static void fuzz_must(int truth, const char *what)
{
    if (truth)
        return;
    fprintf(stderr, "fuzz: not true any more: %s\n", what);
    abort();
}

/* ---- A pool in private memory, and a runtime directory of its own. */

static char fuzz_directory[64] = "/tmp/beluga-fuzz-XXXXXX";

static void fuzz_forget_directory(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", fuzz_directory);
    if (system(command) != 0)
        fprintf(stderr, "fuzz: %s is left behind\n", fuzz_directory);
}

static bl_pool *fuzz_pool(void)
{
    bl_pool_config config = {.pool_id = {1}, .device_size = 6ull * BL_STRIPE_SIZE,
                             .device_count = 2, .interleaved = 1, .lane_count = 4,
                             .slot_count = 16, .bulk_size = BL_PAGE_SIZE, .block_count_max = 32};
    bl_geometry geometry;
    bl_superblock superblocks[2];
    void *devices[2];
    bl_pool *pool;
    fuzz_must(bl_geometry_make(&config, &geometry) == 0, "the pool can be laid out");
    for (uint32_t i = 0; i < 2; i++) {
        bl_superblock_make(&config, &geometry, i, BL_COHERENCE_SOFTWARE, &superblocks[i]);
        devices[i] = aligned_alloc(BL_STRIPE_SIZE, config.device_size);
        memset(devices[i], 0, config.device_size);
    }
    fuzz_must(bl_pool_open(superblocks, devices, &pool) == 0, "the pool can be opened");
    bl_pool_format(pool, superblocks, 1);
    fuzz_must(mkdtemp(fuzz_directory) != NULL, "there is a runtime directory");
    atexit(fuzz_forget_directory);
    return pool;
}

#endif
