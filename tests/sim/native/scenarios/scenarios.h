/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The scenarios: each starts its processes in a new world, runs it, and checks the result.
 */
#ifndef BL_SIM_SCENARIOS_H
#define BL_SIM_SCENARIOS_H

#include "sim/native/world.h"

/* scenarios/litmus.c */
int bl_litmus_message_passing(bl_sim_world *world);
int bl_litmus_torn_line(bl_sim_world *world);
int bl_litmus_store_buffering(bl_sim_world *world);
int bl_litmus_stray_store(bl_sim_world *world);
int bl_litmus_raw_access(bl_sim_world *world);

/* scenarios/litmus_acts.c */
int bl_litmus_two_writers(bl_sim_world *world);
int bl_litmus_stale_store(bl_sim_world *world);
int bl_litmus_crash(bl_sim_world *world);
int bl_litmus_pause(bl_sim_world *world);

/* scenarios/verify.c */
int bl_verify_software(bl_sim_world *world);
int bl_verify_bare_passing(bl_sim_world *world);
int bl_verify_bare_buffering(bl_sim_world *world);
int bl_verify_bare_tearing_8(bl_sim_world *world);
int bl_verify_bare_tearing_16(bl_sim_world *world);
int bl_verify_bare_tearing_32(bl_sim_world *world);
int bl_verify_bare_tearing_64(bl_sim_world *world);
int bl_verify_bare_eviction(bl_sim_world *world);
int bl_verify_bare_prefetch(bl_sim_world *world);

/* scenarios/paths.c */
int bl_path_lane(bl_sim_world *world);
int bl_path_lobby(bl_sim_world *world);

/* scenarios/turns.c */
int bl_path_turns(bl_sim_world *world);

/* scenarios/held.c */
int bl_path_held(bl_sim_world *world);

/* scenarios/sessions.c */
int bl_path_farewell(bl_sim_world *world);
int bl_path_given_up(bl_sim_world *world);

/* scenarios/asleep.c */
int bl_path_asleep(bl_sim_world *world);

/* scenarios/doorbells.c */
int bl_path_doorbells(bl_sim_world *world);

/* scenarios/held.c */
int bl_path_reserves(bl_sim_world *world);

/* scenarios/blocks.c */
int bl_path_index(bl_sim_world *world);
int bl_path_recovery(bl_sim_world *world);
int bl_path_removal(bl_sim_world *world);

/* scenarios/takeover.c */
int bl_takeover_sweep(bl_sim_world *world);
int bl_takeover_elect(bl_sim_world *world);
int bl_takeover_deaths(bl_sim_world *world);
int bl_takeover_watch(bl_sim_world *world);
int bl_takeover_rivals(bl_sim_world *world);
int bl_takeover_late(bl_sim_world *world);
int bl_takeover_zombies(bl_sim_world *world);

/* scenarios/machines.c */
int bl_path_machines(bl_sim_world *world);
int bl_path_reboots(bl_sim_world *world);
int bl_path_declared(bl_sim_world *world);

/* scenarios/tasks.c */
int bl_tasks_deaths(bl_sim_world *world);
int bl_tasks_rivals(bl_sim_world *world);

/* scenarios/kv.c */
int bl_path_kv_full(bl_sim_world *world);
int bl_path_kv(bl_sim_world *world);
int bl_path_kv_stops(bl_sim_world *world);
int bl_path_kv_silent(bl_sim_world *world);
int bl_path_kv_calm(bl_sim_world *world);
int bl_path_kv_names(bl_sim_world *world);
int bl_path_kv_threads(bl_sim_world *world);

/* scenarios/names.c */
int bl_path_followed(bl_sim_world *world);

/* scenarios/below.c */
int bl_path_below(bl_sim_world *world);

/* scenarios/range.c */
int bl_path_range(bl_sim_world *world);

/* scenarios/plan.c */
int bl_rows_run(bl_sim_world *world);

/* scenarios/engine.c */
int bl_engine_put_only(bl_sim_world *world);
int bl_engine_get_only(bl_sim_world *world);
int bl_engine_dsa(bl_sim_world *world);
int bl_engine_dsa_memory(bl_sim_world *world);
int bl_engine_death(bl_sim_world *world);
int bl_engine_zombie(bl_sim_world *world);

/* scenarios/engine_kv.c */
int bl_engine_kv_left(bl_sim_world *world);
int bl_engine_kv(bl_sim_world *world);
int bl_engine_kv_death(bl_sim_world *world);

/* scenarios/register.c */
int bl_path_register(bl_sim_world *world);

/* scenarios/words.c */
int bl_path_first_crash(bl_sim_world *world);
int bl_path_first_word(bl_sim_world *world);
int bl_path_last_word(bl_sim_world *world);

/* scenarios/damage.c */
int bl_path_damage(bl_sim_world *world);
int bl_path_damage_names(bl_sim_world *world);
int bl_path_torn_sessions(bl_sim_world *world);

/* scenarios/heartbeats.c */
int bl_path_heartbeats(bl_sim_world *world);

/* scenarios/system.c */
int bl_path_system(bl_sim_world *world);

#endif
