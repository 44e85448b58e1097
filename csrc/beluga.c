/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The C core in one piece, bottom layer first: reading this list is reading the architecture.
 * cffi compiles it twice, as _core (instructions) and, with BL_SIM, as _sim (the simulator).
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#ifdef BL_SIM
#include "heap_sim.h"
#endif

/* L0 format */
#include "pool_format.h"
#include "api.h"
#include "api_transfer.h"
#include "api_link.h"
#include "dsa_format.h"
#include "api_dsa.h"
#include "api_check.h"
#include "api_verify.h"
#include "pool_format_check.c"

/* L1 primitives */
#include "coherence.h"
#include "crash_point.c"
#include "cpu.c"
#include "crc32c_avx512.c"
#include "crc32c.c"
#include "copy_sse2.c"
#include "copy_avx2.c"
#include "copy_avx512.c"
#include "copy_movdir64b.c"
#include "copy.c"
#include "primitives.c"
#include "guard.c"
#include "crew.c"

/* L2 pool, and whose bytes go over the link to it next */
#include "pool.h"
#include "superblock.c"
#include "pool.c"
#include "host_atomic.h"
#include "throttle.c"
#include "fair.c"
#include "link.c"
#include "queue.h"
#include "queue.c"
#include "admit.c"
#include "port.c"
#include "toll.c"

/* L3 rpc */
#include "line.h"
#include "message.h"
#include "register.h"
#include "epoch.h"
#include "wait.h"
#include "proof.c"
#include "life.c"
#include "beat.c"
#include "lobby.c"
#include "lane.c"
#include "session.c"
#include "house.c"
#include "server.c"
#include "standby.c"
#include "elect.c"
#include "takeover.c"

/* L4 meta */
#include "extent.h"
#include "index.h"
#include "evict.h"
#include "pins.h"
#include "tier.h"
#include "extent.c"
#include "extent_block.c"
#include "index.c"
#include "evict.c"
#include "pins.c"
#include "tier.c"
#include "table.c"
#include "reclaim.c"
#include "lookup.c"
#include "grant.c"
#include "retire.c"
#include "recover_sort.h"
#include "recover.c"
#include "meta.c"
#include "meta_client.c"
#include "check.h"
#include "check.c"
#include "check_server.c"
#include "check_lane.c"
#include "check_payload.c"
#include "check_table.c"
#include "repair.c"
#include "verify_raw.h"
#include "verify_talk.c"
#include "verify_litmus.c"
#include "verify.c"

/* L5 transfer, L6 kvcache */
#include "device_range.h"
#include "device_care.c"
#include "gather.c"
#include "plan.c"
#include "cpu_engine.c"
#include "dsa_queue.c"
#include "dsa_execute.c"
#include "dsa_soft.c"
#include "dsa_work.c"
#include "dsa_engine.c"
#include "keys.c"
#include "kv.c"
#include "kv_get.c"
#include "kv_engine.c"

/* L7 router */
#include "prefix.h"
#include "prefix_tree.h"
#include "prefix_tree.c"
#include "prefix.c"
#include "prefix_find.c"

#ifdef BL_SIM
#include "api_sim.h"
#include "sim_world.h"
#include "sim_order.c"
#include "sim_device.h"
#include "sim_cache.c"
#include "sim_device.c"
#include "sim_world.c"
#include "sim_verbs.c"
#include "sim_discipline.c"
#include "sim_owner.c"
#include "sim_raw.c"
#include "sim_acts.c"
#include "sim_proof.c"
#include "sim_litmus.c"
#include "sim_litmus_acts.c"
#include "sim_verify.c"
#include "sim_paths.c"
#include "sim_turns.c"
#include "sim_blocks.c"
#include "sim_kv.c"
#include "sim_takeover.c"
#include "sim_range.c"
#include "sim_plan.c"
#include "sim_engine.c"
#include "sim_engine_kv.c"
#include "sim_register.c"
#include "sim_words.c"
#include "sim_damage.c"
#include "sim_system.c"
#include "sim_beats.c"
#include "sim_play.c"
#undef malloc
#undef calloc
#undef realloc
#undef free
#endif
