/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A device on each simulated host that does DMA like a GPU or Intel DSA (transfer/device_range.h).
 * A job is split into lines, which are done one by one, in any order, at random times.
 *
 *   read    a line comes from the host's cache if it is there, stale or dirty; otherwise from
 *           memory
 *   write   a line goes to memory, or becomes dirty in the host's cache, depending on the job's
 *           target
 *
 * What is written counts as published when its process has flushed and fenced it, like a plain
 * store; or only fenced it, like a streaming store, if the target is always memory. A job, complete
 * or cut short, may outlive its process and the process's locks by longer than a server needs to
 * check locks; the process is gone when its jobs are.
 */
#ifndef BL_SIM_DEVICE_H
#define BL_SIM_DEVICE_H

#include "sim/native/world.h"

enum {
    BL_SIM_JOB_COUNT = 32,
    BL_SIM_JOB_LINES = 64,
    BL_SIM_JOB_LATE_NS = 40 * 1000 * 1000 /* a dead process's jobs end within about this time */
};

/* The target of writes: ANY is random for each line (DDIO of a GPU's writes); the others are DSA's
 * cache control. */
enum bl_sim_target { BL_SIM_TARGET_ANY, BL_SIM_TARGET_MEMORY, BL_SIM_TARGET_CACHE };

typedef struct bl_sim_job {
    uint8_t data[BL_SIM_JOB_LINES * BL_LINE_SIZE];
    uint64_t left;              /* a bit per remaining line */
    uint64_t offset;
    uint64_t size;
    uint64_t ticket;
    uint64_t wake_ns;           /* the job does nothing until this time */
    void *out;                  /* what a read fills in at completion; NULL: the job writes */
    bl_sim_process *owner;
    const bl_site *site;
    enum bl_sim_target target;
} bl_sim_job;

/* Start a job of the running process on whole lines, at most BL_SIM_JOB_LINES. Returns its
 * ticket. */
uint64_t bl_sim_device_start(const bl_memory *memory, uint64_t offset, const void *source,
                             void *out, uint64_t size, enum bl_sim_target target,
                             const bl_site *site);
#define bl_sim_device_write(memory, offset, source, size, target) \
    bl_sim_device_start(memory, offset, source, NULL, size, target, BL_MARK("device_write"))
#define bl_sim_device_read(memory, offset, out, size) \
    bl_sim_device_start(memory, offset, NULL, out, size, BL_SIM_TARGET_ANY, BL_MARK("device_read"))

/* Wait for a job's completion. */
void bl_sim_device_wait(const bl_memory *memory, uint64_t ticket);

/* ---- For the world: perhaps do one line of a job; or, when all processes sleep, one line of every
 * job. */
void bl_sim_device_happen(bl_sim_world *world);
void bl_sim_device_pass(bl_sim_world *world);

/* A process has died: some of its jobs end here, incomplete, and some pause for a while. */
void bl_sim_device_lose(bl_sim_world *world, const bl_sim_process *process);

/* Do one of the remaining lines of a job. */
void bl_sim_job_step(bl_sim_world *world, uint32_t index);

#endif
