/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Detects raw access: in the simulator the pool's devices are inaccessible address ranges. Code
 * that uses an address without a verb faults; the fault ends the run with a report of the
 * instruction. Other faults are passed to the handler that was installed before.
 */
#include "sim/native/verdict.h"
#include "sim/native/world.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>

/* The world that this thread runs; a signal handler gets no other argument. */
_Thread_local bl_sim_world *bl_sim_running;

int bl_sim_raw_reserve(bl_sim_world *world)
{
    for (uint32_t i = 0; i < world->pool.geometry.device_count; i++) {
        void *base = mmap(NULL, bl_device_size(&world->pool.memory.map, i), PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED)
            return -ENOMEM;
        world->pool.memory.base[i] = base;
    }
    return 0;
}

void bl_sim_raw_release(bl_sim_world *world)
{
    for (uint32_t i = 0; i < world->pool.geometry.device_count; i++)
        if (world->pool.memory.base[i])
            munmap(world->pool.memory.base[i], bl_device_size(&world->pool.memory.map, i));
}

/* This runs on the stack of the faulting process, which is never resumed. */
static void bl_sim_raw_fault(int number, siginfo_t *info, void *context)
{
    bl_sim_world *world = bl_sim_running;
    const uint8_t *address = info->si_addr;
    (void)number;
    for (uint32_t i = 0; world && world->current && i < world->pool.geometry.device_count; i++) {
        const uint8_t *base = world->pool.memory.base[i];
        if (address < base || address >= base + bl_device_size(&world->pool.memory.map, i))
            continue;
        char report[sizeof world->stat.report];
        const bl_site *last = world->last_site;
        snprintf(report, sizeof report,
                 "raw access: device %u, offset 0x%llx, process %u of host %u, "
                 "at instruction 0x%llx, after %s:%u %s",
                 i, (unsigned long long)(address - base), world->current->number,
                 world->current->pool.memory.host, (unsigned long long)bl_interrupted_at(context),
                 last ? last->file : "no verb", last ? last->line : 0,
                 last ? last->verb : "");
        bl_sim_fail(world, -BL_SIM_RAW_ACCESS, report);
    }
    sigaction(SIGSEGV, world ? &world->fault_before : NULL, NULL); /* the access faults again at
                                                                    * once */
}

void bl_sim_raw_watch(bl_sim_world *world)
{
    struct sigaction action = {.sa_sigaction = bl_sim_raw_fault,
                               .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigemptyset(&action.sa_mask);
    world->running_before = bl_sim_running;
    bl_sim_running = world;
    sigaction(SIGSEGV, &action, &world->fault_before);
}

void bl_sim_raw_ignore(bl_sim_world *world)
{
    sigaction(SIGSEGV, &world->fault_before, NULL);
    bl_sim_running = world->running_before;
}
