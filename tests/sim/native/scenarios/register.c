/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A scenario of registers, one after the other: each has two writers, which die one after the other
 * at any verb, often in the middle of a value. Readers on two other hosts must find a whole value
 * and never damage: the last completely written value, or a later one, which the next read need not
 * find again.
 */
#include <errno.h>

#include "liveness/lock.h"
#include "pool/message.h"
#include "pool/register.h"
#include "sim/native/scenarios/paths.h"
#include "sim/native/scenarios/scenarios.h"
#include "sim/native/world.h"

enum {
    BL_REGISTER_KEY = 5,
    BL_REGISTER_WRITERS = 24,   /* two of each register */
    BL_REGISTER_VALUES = 3,     /* values of each writer */
    BL_REGISTER_LIFE_NS = 800,  /* a writer dies within this time */
    BL_REGISTER_LOOKS = 160
};

typedef struct bl_registers {
    bl_sim_world *world;
    uint64_t number;            /* number of the writer; two writers share a register */
    uint64_t written;           /* the last value of which both copies are in memory */
} bl_registers;

static uint64_t bl_register_place(const bl_registers *registers, const bl_pool *pool)
{
    return pool->geometry.data_offset + registers->number / 2 * BL_REGISTER_SIZE;
}

static int bl_register_fill(bl_pool *pool, void *argument)
{
    bl_registers *registers = argument;
    const bl_memory *memory = &pool->memory;
    uint64_t offset = bl_register_place(registers, pool);
    bl_epoch_line line;
    int lock = bl_host_lock(memory, "", "register");
    if (lock < 0)
        return lock;
    int status = bl_register_read(memory, offset, BL_REGISTER_KEY, &line);
    if (status < 0)
        return status;
    if (status == 1)
        bl_register_mend(memory, offset, &line);
    uint64_t last = line.epoch + BL_REGISTER_VALUES;
    for (uint64_t value = line.epoch + 1; value <= last; value++) {
        line = (bl_epoch_line){.epoch = value, .nonce = value, .boot_id = {value, value}};
        bl_table_seal(&line, BL_REGISTER_KEY);
        bl_register_write(memory, offset, &line);
    }
    bl_host_unlock(memory, lock);
    registers->written = last;
    return 0;
}

/* Deliver some pieces of a writer's pending stores. */
static void bl_register_drain(bl_sim_world *world, bl_sim_process *writer)
{
    for (uint64_t pieces = bl_sim_below(world, 16); pieces && writer->store_count; pieces--)
        bl_sim_drain(world, writer);
}

/* Run one writer after the other. */
static int bl_register_keep(bl_pool *pool, void *argument)
{
    bl_registers *registers = argument;
    bl_sim_world *world = registers->world;
    for (uint32_t i = 0; i < BL_REGISTER_WRITERS; i++) {
        int writer = bl_sim_spawn(world, 0, bl_register_fill, registers);
        if (writer < 0)
            return writer;
        bl_nap(&pool->memory, bl_sim_below(world, BL_REGISTER_LIFE_NS));
        bl_register_drain(world, world->process[writer]);
        bl_sim_kill(world, (uint32_t)writer);
        while (!bl_sim_gone(world->process[writer]))
            bl_nap(&pool->memory, 1000);
        bl_nap(&pool->memory, BL_REGISTER_LIFE_NS);
        if (++registers->number % 2 == 0)
            registers->written = 0;
    }
    return 0;
}

static int bl_register_follow(bl_pool *pool, void *argument)
{
    bl_registers *registers = argument;
    uint64_t seen = 0; /* 1 + the register that had a value */
    for (uint32_t i = 0; i < BL_REGISTER_LOOKS; i++) {
        bl_epoch_line line;
        uint64_t number = registers->number / 2;
        uint64_t written = registers->written;
        int status = bl_register_read(&pool->memory, bl_register_place(registers, pool),
                                      BL_REGISTER_KEY, &line);
        if (status < 0)
            return status;
        if (line.epoch < written || line.nonce != line.epoch || line.boot_id[0] != line.epoch ||
            line.boot_id[1] != line.epoch)
            return -EBADMSG;
        if (status == 0 && seen == number + 1)
            return -ENODATA; /* a register with a value is never unwritten again */
        seen = status == 1 ? number + 1 : seen;
        registers->world->stat.results++;
        bl_nap(&pool->memory, bl_sim_below(registers->world, 500));
    }
    return 0;
}

/* ---- register */

int bl_path_register(bl_sim_world *world)
{
    bl_registers registers = {.world = world};
    bl_sim_spawn(world, 0, bl_register_keep, &registers);
    bl_sim_spawn(world, 1, bl_register_follow, &registers);
    bl_sim_spawn(world, 2, bl_register_follow, &registers);
    return bl_sim_world_run(world);
}
