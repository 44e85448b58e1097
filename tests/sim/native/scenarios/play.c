/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Lists the scenarios and runs one: all of them use the same small pool.
 */
#include "sim/native/scenarios/scenarios.h"
#include "sim/native/world.h"

#include <errno.h>
#include <stdlib.h>

enum {
    BL_SIM_LANE_COUNT = 4,
    BL_SIM_LANES_FEW = 2,       /* each client has a session */
    BL_SIM_LANES_MANY = 24      /* sessions on hosts without a server may be suspect forever */
};

static const bl_sim_scenario bl_sim_scenarios[] = {
    {"message_passing", bl_litmus_message_passing, 0},
    {"torn_line", bl_litmus_torn_line, 0},
    {"store_buffering", bl_litmus_store_buffering, 0},
    {"stray_store", bl_litmus_stray_store, 0},
    {"raw_access", bl_litmus_raw_access, 0},
    {"two_writers", bl_litmus_two_writers, 0},
    {"stale_store", bl_litmus_stale_store, 0},
    {"host_crash", bl_litmus_crash, 0},
    {"pause", bl_litmus_pause, 0},
    {"verify_software", bl_verify_software, 0},
    {"verify_bare_passing", bl_verify_bare_passing, 0},
    {"verify_bare_buffering", bl_verify_bare_buffering, 0},
    {"verify_bare_tearing_8", bl_verify_bare_tearing_8, 0},
    {"verify_bare_tearing_16", bl_verify_bare_tearing_16, 0},
    {"verify_bare_tearing_32", bl_verify_bare_tearing_32, 0},
    {"verify_bare_tearing_64", bl_verify_bare_tearing_64, 0},
    {"verify_bare_eviction", bl_verify_bare_eviction, 0},
    {"verify_bare_prefetch", bl_verify_bare_prefetch, 0},
    {"lane", bl_path_lane, 0},
    {"lobby", bl_path_lobby, 0},
    {"turns", bl_path_turns, 0},
    {"held", bl_path_held, 0},
    {"farewell", bl_path_farewell, 0},
    {"given_up", bl_path_given_up, 0},
    {"asleep", bl_path_asleep, 0},
    {"doorbells", bl_path_doorbells, 8},
    {"reserves", bl_path_reserves, 0},
    {"index", bl_path_index, 0},
    {"recovery", bl_path_recovery, 0},
    {"removal", bl_path_removal, 0},
    {"elect", bl_takeover_elect, 0},
    {"sweep", bl_takeover_sweep, 0},
    {"takeover", bl_takeover_deaths, 0},
    {"watch", bl_takeover_watch, 0},
    {"rivals", bl_takeover_rivals, 0},
    {"late", bl_takeover_late, 0},
    {"zombies", bl_takeover_zombies, 0},
    {"machines", bl_path_machines, 8},
    {"reboots", bl_path_reboots, 0},
    {"declared", bl_path_declared, BL_SIM_LANES_FEW},
    {"tasks", bl_tasks_deaths, 0},
    {"tasks_rivals", bl_tasks_rivals, 0},
    {"kv", bl_path_kv, 0},
    {"kv_stops", bl_path_kv_stops, 0},
    {"kv_silent", bl_path_kv_silent, 0},
    {"kv_calm", bl_path_kv_calm, 0},
    {"kv_names", bl_path_kv_names, 0},
    {"kv_full", bl_path_kv_full, 0},
    {"kv_threads", bl_path_kv_threads, 0},
    {"followed", bl_path_followed, 8},
    {"below", bl_path_below, 8},
    {"range", bl_path_range, 0},
    {"rows", bl_rows_run, 0},
    {"device_put", bl_engine_put_only, 0},
    {"device_get", bl_engine_get_only, 0},
    {"device_dsa", bl_engine_dsa, 0},
    {"device_dsa_memory", bl_engine_dsa_memory, 0},
    {"device_death", bl_engine_death, 0},
    {"device_zombie", bl_engine_zombie, 0},
    {"device_kv", bl_engine_kv, 0},
    {"device_kv_death", bl_engine_kv_death, 0},
    {"device_kv_left", bl_engine_kv_left, 8},
    {"register", bl_path_register, 0},
    {"first_word", bl_path_first_word, BL_SIM_LANES_MANY},
    {"first_crash", bl_path_first_crash, BL_SIM_LANES_MANY},
    {"last_word", bl_path_last_word, 0},
    {"damage", bl_path_damage, 0},
    {"damage_names", bl_path_damage_names, 0},
    {"torn_sessions", bl_path_torn_sessions, 8},
    {"heartbeats", bl_path_heartbeats, 0},
    {"system", bl_path_system, BL_SIM_LANES_MANY},
    {NULL, NULL, 0},
};

const char *bl_sim_scenario_name(uint32_t index)
{
    uint32_t count = sizeof bl_sim_scenarios / sizeof *bl_sim_scenarios;
    return index < count ? bl_sim_scenarios[index].name : NULL;
}

static int bl_sim_geometry(const bl_sim_scenario *scenario, uint32_t apart, bl_geometry *out)
{
    int removes = scenario->play == bl_path_removal || scenario->play == bl_path_below;
    const bl_pool_config config = {
        .device_size = 9 * BL_STRIPE_SIZE,
        .device_count = 2 + apart,
        .interleaved = BL_PLACEMENT_INTERLEAVED | (apart ? BL_PLACEMENT_METADATA : 0),
        .lane_count = scenario->lane_count ? scenario->lane_count : BL_SIM_LANE_COUNT,
        .slot_count = 4,
        .bulk_size = BL_PAGE_SIZE,
        .block_count_max = removes ? 22 : 12, /* each client may remove all keys at a time */
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
    uint32_t apart = config->coherent == BL_SIM_METADATA;
    int status = bl_sim_geometry(&bl_sim_scenarios[i], apart, &geometry);
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
