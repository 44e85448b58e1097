/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The list of scenarios, and playing one: all in the same small pool.
 */
#include "sim_world.h"

#include <errno.h>
#include <stdlib.h>

static const bl_sim_scenario bl_sim_scenarios[] = {
    {"message_passing", bl_litmus_message_passing},
    {"torn_line", bl_litmus_torn_line},
    {"store_buffering", bl_litmus_store_buffering},
    {"stray_store", bl_litmus_stray_store},
    {"verify_discipline", bl_verify_discipline},
    {"verify_bare_passing", bl_verify_bare_passing},
    {"verify_bare_buffering", bl_verify_bare_buffering},
    {"verify_bare_tearing_8", bl_verify_bare_tearing_8},
    {"verify_bare_tearing_16", bl_verify_bare_tearing_16},
    {"verify_bare_tearing_32", bl_verify_bare_tearing_32},
    {"verify_bare_tearing_64", bl_verify_bare_tearing_64},
    {"verify_bare_eviction", bl_verify_bare_eviction},
    {"verify_bare_prefetch", bl_verify_bare_prefetch},
    {"lane", bl_path_lane},
    {"lobby", bl_path_lobby},
    {"meta", bl_path_meta},
    {"recovery", bl_path_recovery},
    {"kv", bl_path_kv},
    {"kv_calm", bl_path_kv_calm},
    {"range", bl_path_range},
    {"damage", bl_path_damage},
    {NULL, NULL},
};

const char *bl_sim_scenario_name(uint32_t index)
{
    uint32_t count = sizeof bl_sim_scenarios / sizeof *bl_sim_scenarios;
    return index < count ? bl_sim_scenarios[index].name : NULL;
}

static int bl_sim_geometry(bl_geometry *out)
{
    static const bl_pool_config config = {
        .device_size = 9 * BL_STRIPE_SIZE,
        .device_count = 2,
        .interleaved = 1,
        .lane_count = 4,
        .slot_count = 4,
        .bulk_size = BL_PAGE_SIZE,
        .block_count_max = 12,
    };
    return bl_geometry_make(&config, out);
}

int bl_sim_play(const char *scenario, const bl_sim_config *config, bl_sim_stat *stat,
                uint64_t *stale, uint64_t *hits)
{
    bl_geometry geometry;
    bl_sim_world *world;
    uint32_t i = 0;
    while (bl_sim_scenarios[i].name && strcmp(bl_sim_scenarios[i].name, scenario) != 0)
        i++;
    if (!bl_sim_scenarios[i].name)
        return -ENOENT;
    int status = bl_sim_geometry(&geometry);
    if (status == 0)
        status = bl_sim_world_create(&world, config, &geometry);
    if (status < 0)
        return status;
    status = bl_sim_scenarios[i].play(world);
    *stat = world->stat;
    if (stale)
        memcpy(stale, world->stale, (bl_sim_site_count() + 1) * sizeof *stale);
    if (hits)
        memcpy(hits, world->hits, (bl_sim_site_count() + 1) * sizeof *hits);
    bl_sim_world_destroy(world);
    return status;
}
