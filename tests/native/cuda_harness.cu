/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Runs the kernels in a separate process, built with sanitizers. Over pipes, tests allocate memory
 * of an exact length, fill it, run a kernel by name, and read its accesses. A request is a letter
 * and three 64-bit numbers, then bytes.
 *
 *   A size ragged    allocate at an aligned address plus ragged; replies the address
 *   W address size   bytes follow
 *   R address size   the bytes
 *   L kernel blocks threads  a job follows; replies the number of accesses, and the accesses
 *   B bug            plant a bug
 *   F                free all
 */
#include <stdint.h>

static uint32_t bl_planted;     /* the build contains all planted bugs; a test selects one */
#define BL_PLANT bl_planted

#include "kv_copy.cu"

enum { BL_ALLOCATIONS_MAX = 4096 };

static void *bl_allocations[BL_ALLOCATIONS_MAX];
static uint32_t bl_allocation_count;

typedef void (*bl_kernel)(const bl_job *job, bl_grid grid, bl_trace *trace);

static const bl_kernel bl_kernels[] = {
    bl_gather,  bl_gather_sum,  bl_gather_half,  bl_gather_half_sum,
    bl_scatter, bl_scatter_sum, bl_scatter_half, bl_scatter_half_sum,
};

static void bl_take(void *target, size_t size)
{
    if (size > 0 && fread(target, size, 1, stdin) != 1)
        exit(0);
}

static void bl_put_out(const void *source, size_t size)
{
    if (size > 0)
        fwrite(source, size, 1, stdout);
}

static void bl_allocate(uint64_t size, uint64_t ragged)
{
    void *memory = NULL;
    if (bl_allocation_count == BL_ALLOCATIONS_MAX || posix_memalign(&memory, 64, size + ragged))
        abort();
    bl_allocations[bl_allocation_count++] = memory;
    uint64_t address = (uint64_t)memory + ragged;
    bl_put_out(&address, sizeof address);
}

static void bl_launch(const uint64_t *numbers)
{
    bl_job job;
    bl_take(&job, sizeof job);
    static bl_trace trace = {NULL, 1 << 20, 0, 0, 0};
    if (!trace.accesses)
        trace.accesses = (bl_access *)malloc(trace.capacity * sizeof(bl_access));
    trace.count = 0;
    bl_grid grid = {(uint32_t)numbers[1], (uint32_t)numbers[2]};
    bl_kernels[numbers[0]](&job, grid, &trace);
    bl_put_out(&trace.count, sizeof trace.count);
    bl_put_out(trace.accesses, trace.count * sizeof(bl_access));
}

int main(void)
{
    for (;;) {
        uint64_t request[4];
        bl_take(request, sizeof request);
        switch ((char)request[0]) {
        case 'A':
            bl_allocate(request[1], request[2]);
            break;
        case 'W':
            bl_take((void *)request[1], request[2]);
            break;
        case 'R':
            bl_put_out((const void *)request[1], request[2]);
            break;
        case 'L':
            bl_launch(request + 1);
            break;
        case 'B':
            bl_planted = (uint32_t)request[1];
            break;
        default:
            while (bl_allocation_count > 0)
                free(bl_allocations[--bl_allocation_count]);
        }
        fflush(stdout);
    }
}
