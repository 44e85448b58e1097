/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Scenarios of the rules of transfer/device_range.h, one by one: a payload is written or read by
 * DMA, with readers on another host, while its writer lives or is killed.
 */
#include <errno.h>

#include "api/transfer.h"
#include "transfer/device_range.h"
#include "liveness/lock.h"
#include "sim/native/device.h"
#include "sim/native/scenarios/litmus.h"
#include "sim/native/scenarios/scenarios.h"

enum {
    BL_ENGINE_ROUNDS = 30,
    BL_ENGINE_SIZE = 5 * BL_LINE_SIZE,
    BL_ENGINE_LOOKS = 40,
    BL_ENGINE_NONCE = 77,
    BL_ENGINE_VERBS = 400,      /* a writer to be killed dies within this many verbs */
    BL_ENGINE_EAGER = 1000,     /* checks of a process that waits for the proof, between naps */
    BL_ENGINE_NAP_NS = 1000 * 1000
};

typedef struct bl_engine_case {
    bl_litmus litmus;
    uint32_t writes;            /* 1: the writer's payload is copied by DMA */
    uint32_t reads;             /* 1: the readers' payload is copied by DMA */
    uint32_t dsa;               /* 1: a job's target is drawn once, not for each line */
    uint32_t to_memory;         /* 1: the target is always memory, and nothing is flushed */
    uint32_t hasty;             /* 1: a process that finds the writer dead does not wait for
                                 * proof */
    uint32_t owner;             /* process */
} bl_engine_case;

static enum bl_sim_target bl_engine_target(const bl_engine_case *engine)
{
    if (engine->to_memory)
        return BL_SIM_TARGET_MEMORY;
    if (!engine->dsa)
        return BL_SIM_TARGET_ANY;
    return bl_sim_below(engine->litmus.world, 2) ? BL_SIM_TARGET_MEMORY : BL_SIM_TARGET_CACHE;
}

/* Maintain two ranges, as for a plan with unordered chunks that end within lines. */
static void bl_engine_maintenance(const bl_engine_case *engine, const bl_pool *pool,
                                  uint32_t maintenance)
{
    enum { LAST = 3 * BL_LINE_SIZE, MIDDLE = 2 * BL_LINE_SIZE };
    uint64_t offset = engine->litmus.payload;
    bl_chunk chunks[] = {{offset + LAST, BL_ENGINE_SIZE - LAST, 0},
                         {offset, MIDDLE - 1, 0},
                         {offset + MIDDLE, LAST - MIDDLE, 0}};
    bl_plan plan = {.chunks = chunks, .chunk_count = sizeof chunks / sizeof *chunks};
    bl_plan_maintenance(pool, &plan, maintenance, 1);
}

/* Write from device to pool, with everything that must precede the publication. */
static void bl_engine_write(const bl_engine_case *engine, const bl_pool *pool, const void *payload)
{
    const bl_memory *memory = &pool->memory;
    uint64_t offset = engine->litmus.payload;
    if (engine->writes) {
        bl_sim_device_wait(memory, bl_sim_device_write(memory, offset, payload, BL_ENGINE_SIZE,
                                                       bl_engine_target(engine)));
        bl_engine_maintenance(engine, pool, engine->to_memory ? BL_MAINTENANCE_FENCE
                              : BL_MAINTENANCE_FLUSH);
    } else {
        bl_stream(memory, offset, payload, BL_ENGINE_SIZE);
        bl_fence_store(memory);
    }
}

/* Read from pool to device, after the read of the entry. */
static void bl_engine_read(const bl_engine_case *engine, const bl_pool *pool, void *payload)
{
    const bl_memory *memory = &pool->memory;
    uint64_t offset = engine->litmus.payload;
    if (engine->reads) {
        bl_engine_maintenance(engine, pool, BL_MAINTENANCE_INVALIDATE);
        bl_sim_device_wait(memory, bl_sim_device_read(memory, offset, payload, BL_ENGINE_SIZE));
    } else {
        bl_refetch(memory, offset, BL_ENGINE_SIZE);
        bl_fetch(memory, offset, payload, BL_ENGINE_SIZE);
    }
}

/* ---- A payload that is rewritten during reads, as in bl_litmus_message_passing. */

static int bl_engine_writer(bl_pool *pool, void *argument)
{
    bl_engine_case *engine = argument;
    const bl_memory *memory = &pool->memory;
    uint8_t payload[BL_ENGINE_SIZE];
    for (uint32_t number = 1; number <= BL_ENGINE_ROUNDS; number++) {
        bl_entry line = bl_litmus_line(number, BL_ENTRY_FREE);
        bl_publish_line(memory, engine->litmus.flag, &line);
        bl_fence_full(memory); /* a device must not overtake it */
        memset(payload, (int)number, sizeof payload);
        bl_engine_write(engine, pool, payload);
        line = bl_litmus_line(number, BL_ENTRY_COMMITTED);
        bl_publish_line(memory, engine->litmus.flag, &line);
        for (uint64_t wait = bl_sim_below(engine->litmus.world, 30); wait > 0; wait--)
            bl_pause(memory);
    }
    bl_fence_full(memory);
    engine->litmus.finished = 1;
    return 0;
}

/* Try one read. Returns 1 if a payload was read and confirmed, 0 if not, or -EBADMSG. */
static int bl_engine_look(const bl_engine_case *engine, const bl_pool *pool)
{
    const bl_memory *memory = &pool->memory;
    uint8_t payload[BL_ENGINE_SIZE];
    uint64_t flag = engine->litmus.flag;
    bl_entry line, again;
    if (!bl_litmus_look(memory, flag, &line) || line.state != BL_ENTRY_COMMITTED)
        return 0;
    bl_engine_read(engine, pool, payload);
    bl_litmus_look(memory, flag, &again);
    if (memcmp(&line, &again, sizeof line) != 0)
        return 0;
    bl_confirm(memory, flag, engine->litmus.payload, sizeof payload);
    for (uint32_t i = 0; i < sizeof payload; i++)
        if (payload[i] != line.generation)
            return -EBADMSG;
    engine->litmus.world->stat.results++;
    return 1;
}

static int bl_engine_reader(bl_pool *pool, void *argument)
{
    const bl_engine_case *engine = argument;
    int status = 0;
    while (!engine->litmus.finished && status >= 0)
        status = bl_engine_look(engine, pool);
    return status < 0 ? status : 0;
}

static int bl_engine_run(bl_sim_world *world, bl_engine_case engine)
{
    engine.litmus = bl_litmus_make(world);
    bl_sim_spawn(world, 0, bl_engine_writer, &engine);
    bl_sim_spawn(world, 1, bl_engine_reader, &engine);
    bl_sim_spawn(world, 2, bl_engine_reader, &engine);
    return bl_sim_world_run(world);
}

int bl_engine_put_only(bl_sim_world *world)
{
    return bl_engine_run(world, (bl_engine_case){.writes = 1});
}

int bl_engine_get_only(bl_sim_world *world)
{
    return bl_engine_run(world, (bl_engine_case){.reads = 1});
}

int bl_engine_dsa(bl_sim_world *world)
{
    return bl_engine_run(world, (bl_engine_case){.writes = 1, .reads = 1, .dsa = 1});
}

/* Cache control is off, and this device bypasses the cache accordingly. */
int bl_engine_dsa_memory(bl_sim_world *world)
{
    return bl_engine_run(world, (bl_engine_case){.writes = 1, .reads = 1, .to_memory = 1});
}

/* ---- A writer dies while its device writes. A process of its host proves it gone, flushes its
 * granted space, and reassigns the space; what the next owner writes there must stay. */

static int bl_engine_doomed(bl_pool *pool, void *argument)
{
    const bl_engine_case *engine = argument;
    uint8_t payload[BL_ENGINE_SIZE];
    int liveness_lock = bl_liveness_hold(&pool->memory, "", BL_ENGINE_NONCE);
    if (liveness_lock >= 0)
        bl_liveness_devices(&pool->memory, liveness_lock, 1);
    memset(payload, 0xee, sizeof payload);
    while (liveness_lock >= 0) { /* until it is killed */
        bl_sim_device_write(&pool->memory, engine->litmus.payload, payload, sizeof payload,
                            BL_SIM_TARGET_ANY);
        for (uint64_t wait = bl_sim_below(engine->litmus.world, 60); wait > 0; wait--)
            bl_pause(&pool->memory);
    }
    return liveness_lock;
}

static int bl_engine_reaper(bl_pool *pool, void *argument)
{
    const bl_engine_case *engine = argument;
    const bl_memory *memory = &pool->memory;
    bl_sim_world *world = engine->litmus.world;
    int liveness_lock = -ENOENT, looks = 0;
    while (liveness_lock < 0 && bl_sim_alive(world, engine->owner)) {
        liveness_lock = bl_liveness_watch(memory, "", BL_ENGINE_NONCE);
        bl_pause(memory);
    }
    while (bl_sim_alive(world, engine->owner) ||
           (liveness_lock >= 0 && !engine->hasty && !bl_liveness_gone(memory, liveness_lock)))
        looks++ < BL_ENGINE_EAGER ? bl_pause(memory) : bl_nap(memory, BL_ENGINE_NAP_NS);
    bl_device_written(memory, engine->litmus.payload, BL_ENGINE_SIZE);
    bl_entry line = bl_litmus_line(1, BL_ENTRY_FREE); /* the next owner's entry */
    bl_publish_line(memory, engine->litmus.flag, &line);
    return 0;
}

static int bl_engine_heir(bl_pool *pool, void *argument)
{
    bl_engine_case *engine = argument;
    const bl_memory *memory = &pool->memory;
    uint8_t payload[BL_ENGINE_SIZE];
    bl_entry line;
    while (!bl_litmus_look(memory, engine->litmus.flag, &line))
        bl_pause(memory);
    memset(payload, 2, sizeof payload);
    bl_engine_write(engine, pool, payload);
    line = bl_litmus_line(2, BL_ENTRY_COMMITTED);
    bl_publish_line(memory, engine->litmus.flag, &line);
    bl_fence_full(memory);
    engine->litmus.finished = 1;
    for (uint32_t i = 0; i < BL_ENGINE_LOOKS; i++) {
        int status = bl_engine_look(engine, pool);
        if (status < 0)
            return status;
    }
    return 0;
}

static int bl_engine_bury(bl_sim_world *world, bl_engine_case engine)
{
    engine.litmus = bl_litmus_make(world);
    engine.owner = (uint32_t)bl_sim_spawn(world, 0, bl_engine_doomed, &engine);
    bl_sim_kill_after(world, engine.owner, 1 + bl_sim_below(world, BL_ENGINE_VERBS));
    bl_sim_spawn(world, 0, bl_engine_reaper, &engine);
    bl_sim_spawn(world, 1, bl_engine_heir, &engine);
    return bl_sim_world_run(world);
}

int bl_engine_death(bl_sim_world *world)
{
    return bl_engine_bury(world, (bl_engine_case){.reads = 1});
}

/* The same without proof of death: the one device scenario that must fail. */
int bl_engine_zombie(bl_sim_world *world)
{
    return bl_engine_bury(world, (bl_engine_case){.reads = 1, .hasty = 1});
}
