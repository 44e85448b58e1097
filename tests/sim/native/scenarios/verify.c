/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A scenario of the acceptance test of `beluga verify`, with two hosts whose caches are not
 * coherent with each other. By the rules of software coherence there are no violations; by bare
 * loads and stores there are, which shows that the programs detect them.
 */
#include "api/verify.h"
#include "sim/native/scenarios/scenarios.h"
#include "sim/native/world.h"
#include "verify/acceptance.h"

#include <errno.h>

typedef struct bl_sim_acceptance {
    bl_sim_world *world;
    bl_acceptance_config config;
    uint32_t raw_width;         /* bytes that the bare mode stores in one piece */
} bl_sim_acceptance;

static int bl_sim_verify_side(bl_pool *pool, void *argument, uint32_t role)
{
    const bl_sim_acceptance *sim = argument;
    bl_acceptance_config config = sim->config;
    bl_acceptance *acceptance;
    const bl_acceptance_cell *cells;
    config.role = role;
    int status = bl_acceptance_create(pool, &config, &acceptance);
    if (status < 0)
        return status;
    acceptance->raw_width = sim->raw_width;
    status = bl_acceptance_run(acceptance);
    uint32_t count = bl_acceptance_cells(acceptance, &cells);
    for (uint32_t i = 0; i < count && status == 0; i++) {
        int chosen = (config.tests >> cells[i].test & config.modes >> cells[i].mode & 1) != 0;
        if (chosen != (cells[i].trials > 0))
            status = -EPROTO;
        else if (cells[i].violations > 0)
            status = -EBADMSG;
        sim->world->stat.results += cells[i].trials;
        sim->world->stat.torn_lines += cells[i].rejected;
    }
    bl_acceptance_destroy(acceptance);
    return status;
}

static int bl_sim_verify_a(bl_pool *pool, void *argument)
{
    return bl_sim_verify_side(pool, argument, 0);
}

static int bl_sim_verify_b(bl_pool *pool, void *argument)
{
    return bl_sim_verify_side(pool, argument, 1);
}

/* Run the tests; tests has a bit per test. */
static int bl_sim_verify_run(bl_sim_world *world, uint32_t tests, uint32_t mode, uint32_t raw_width)
{
    bl_sim_acceptance sim = {
        .world = world,
        .config = {.patience_ns = 100000000000u, .tests = tests, .modes = 1u << mode},
        .raw_width = raw_width,
    };
    world->lawless = 1; /* tests the memory, so the ownership rules do not apply */
    bl_sim_spawn(world, 0, bl_sim_verify_a, &sim);
    bl_sim_spawn(world, 1, bl_sim_verify_b, &sim);
    return bl_sim_world_run(world);
}

int bl_verify_software(bl_sim_world *world)
{
    return bl_sim_verify_run(world, (1u << BL_ACCEPTANCE_TEST_COUNT) - 1, BL_ACCEPTANCE_SOFTWARE,
                             8);
}

static int bl_sim_verify_bare(bl_sim_world *world, uint32_t test, uint32_t raw_width)
{
    return bl_sim_verify_run(world, 1u << test, BL_ACCEPTANCE_BARE, raw_width);
}

int bl_verify_bare_passing(bl_sim_world *world)
{
    return bl_sim_verify_bare(world, BL_ACCEPTANCE_MESSAGE_PASSING, 8);
}

int bl_verify_bare_buffering(bl_sim_world *world)
{
    return bl_sim_verify_bare(world, BL_ACCEPTANCE_STORE_BUFFERING, 8);
}

int bl_verify_bare_tearing_8(bl_sim_world *world)
{
    return bl_sim_verify_bare(world, BL_ACCEPTANCE_TEARING_8, 4); /* A1 rules it out */
}

int bl_verify_bare_tearing_16(bl_sim_world *world)
{
    return bl_sim_verify_bare(world, BL_ACCEPTANCE_TEARING_16, 8);
}

int bl_verify_bare_tearing_32(bl_sim_world *world)
{
    return bl_sim_verify_bare(world, BL_ACCEPTANCE_TEARING_32, 8);
}

int bl_verify_bare_tearing_64(bl_sim_world *world)
{
    return bl_sim_verify_bare(world, BL_ACCEPTANCE_TEARING_64, 8);
}

int bl_verify_bare_eviction(bl_sim_world *world)
{
    return bl_sim_verify_bare(world, BL_ACCEPTANCE_LATE_EVICTION, 8);
}

int bl_verify_bare_prefetch(bl_sim_world *world)
{
    return bl_sim_verify_bare(world, BL_ACCEPTANCE_PREFETCH, 8);
}
