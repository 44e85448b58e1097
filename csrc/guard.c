/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The SIGBUS handler and its regions: see guard.h. The handler is installed once, with the first
 * region, and never removed; it only reads the thread's regions and jumps, which a handler may do.
 * SA_NODEFER: the signal is not blocked in it, so that the jump need not restore a mask.
 */
#include "guard.h"

#include "api.h"

#ifdef BL_SIM

int bl_guarded(const bl_memory *memory, bl_guarded_run run, void *context)
{
    (void)memory;
    return run(context); /* the simulator's memory does not fail like this */
}

uint64_t bl_guard_offset(const bl_memory *memory)
{
    (void)memory;
    return UINT64_MAX;
}

const void *bl_guard_address(void) { return NULL; }

void bl_guard_adopt(const void *address) { (void)address; }

#else

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>

typedef struct bl_region {
    sigjmp_buf out;
    const bl_memory *memory;
    struct bl_region *outer;
} bl_region;

static __thread bl_region *bl_region_here;
static __thread const void *bl_bus_address;
static struct sigaction bl_bus_before;
static pthread_once_t bl_bus_once = PTHREAD_ONCE_INIT;

/* The device that is mapped at address, and where in it; device_count: none. */
static bl_place bl_bus_place(const bl_memory *memory, const void *address)
{
    uint64_t size = (memory->map.device_stripes + 1) * BL_STRIPE_SIZE;
    bl_place place = {0, 0};
    for (; place.device < memory->map.device_count; place.device++) {
        place.device_offset = (uintptr_t)address - (uintptr_t)memory->base[place.device];
        if (place.device_offset < size)
            break;
    }
    return place;
}

static int bl_region_has(const bl_region *region, const void *address)
{
    return bl_bus_place(region->memory, address).device < region->memory->map.device_count;
}

uint64_t bl_guard_offset(const bl_memory *memory)
{
    bl_place place = bl_bus_place(memory, bl_bus_address);
    return place.device < memory->map.device_count && place.device_offset >= BL_STRIPE_SIZE
               ? bl_interleave_offset(&memory->map, place)
               : UINT64_MAX;
}

const void *bl_guard_address(void) { return bl_bus_address; }

void bl_guard_adopt(const void *address) { bl_bus_address = address; }

static void bl_bus_handle(int number, siginfo_t *info, void *context)
{
    for (bl_region *region = bl_region_here; region != NULL; region = region->outer)
        if (bl_region_has(region, info->si_addr)) {
            bl_region_here = region->outer;
            bl_bus_address = info->si_addr;
            siglongjmp(region->out, 1);
        }
    if (bl_bus_before.sa_flags & SA_SIGINFO)
        bl_bus_before.sa_sigaction(number, info, context);
    else if (bl_bus_before.sa_handler != SIG_DFL && bl_bus_before.sa_handler != SIG_IGN)
        bl_bus_before.sa_handler(number);
    else
        sigaction(number, &bl_bus_before, NULL); /* tried again, it ends the process */
}

static void bl_bus_install(void)
{
    struct sigaction action = {.sa_sigaction = bl_bus_handle,
                               .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &bl_bus_before);
}

int bl_guarded(const bl_memory *memory, bl_guarded_run run, void *context)
{
    bl_region region = {.memory = memory, .outer = bl_region_here};
    pthread_once(&bl_bus_once, bl_bus_install);
    if (sigsetjmp(region.out, 0) != 0)
        return -BL_ERROR_DEVICE_FAULT;
    bl_region_here = &region;
    int status = run(context);
    bl_region_here = region.outer;
    return status;
}

#endif
