/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The C core in one piece, bottom folder first (README.md has the list of folders).
 * cffi compiles it twice, as _core (instructions) and, with BL_SIM, as _sim (the simulator).
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#ifdef BL_SIM
#include "base/heap_sim.h"
#endif

#include "format/pool_format_check.c"

#include "coherence/crash_point.c"
#include "coherence/x86_cpu.c"
#include "coherence/aarch64_cpu.c"
#include "coherence/cpu.c"
#include "coherence/x86_crc32c.c"
#include "coherence/x86_crc32c_wide.c"
#include "coherence/aarch64_crc32c.c"
#include "coherence/crc32c.c"
#include "coherence/x86_copy.c"
#include "coherence/aarch64_copy.c"
#include "coherence/copy.c"
#include "coherence/primitives.c"
#include "coherence/guard.c"

#include "pool/superblock.c"
#include "pool/pool.c"

#include "space/pages.c"
#include "space/extent.c"
#include "space/victims.c"

#include "iosched/bucket.c"
#include "iosched/fair.c"
#include "iosched/link.c"
#include "iosched/queue.c"
#include "iosched/admit.c"
#include "iosched/io_queue.c"
#include "iosched/throttle.c"

#include "liveness/lock.c"
#include "liveness/pidfds.c"
#include "liveness/heartbeat.c"

#include "rpc/lobby.c"
#include "rpc/lane.c"
#include "rpc/session.c"
#include "rpc/trace.c"
#include "rpc/jobs.c"
#include "rpc/operate.c"
#include "rpc/housekeeping.c"
#include "rpc/report.c"
#include "rpc/server.c"
#include "rpc/standby.c"
#include "rpc/elect.c"
#include "rpc/declare.c"
#include "rpc/reason.c"
#include "rpc/takeover.c"

#include "transfer/thread_pool.c"
#include "transfer/cache_maintenance.c"
#include "transfer/plan.c"
#include "transfer/cpu.c"
#include "transfer/block.c"

#include "dsa/queue.c"
#include "dsa/execute.c"
#include "dsa/soft.c"
#include "dsa/work.c"
#include "dsa/engine.c"

#include "index/hash.c"
#include "index/s3fifo.c"
#include "index/gdsf.c"
#include "index/evict.c"
#include "index/pins.c"
#include "index/tier.c"
#include "index/tasks.c"
#include "index/table.c"
#include "index/tenants.c"
#include "index/kept.c"
#include "index/numbers.c"
#include "index/tombs.c"
#include "index/reclaim.c"
#include "index/lookup.c"
#include "index/grant.c"
#include "index/task_call.c"
#include "index/lower.c"
#include "index/journal.c"
#include "index/events.c"
#include "index/retire.c"
#include "index/recover.c"
#include "index/stat.c"
#include "index/sessions.c"
#include "index/left.c"
#include "index/map.c"
#include "index/meta.c"
#include "index/client.c"
#include "index/task_client.c"
#include "index/lower_client.c"

#include "store/keys.c"
#include "store/store.c"
#include "store/recover.c"
#include "store/uring.c"
#include "store/disk.c"

#include "kv/keys.c"
#include "kv/batch.c"
#include "kv/put.c"
#include "kv/get.c"

#include "check/places.c"
#include "check/line.c"
#include "check/check.c"
#include "check/server.c"
#include "check/entries.c"
#include "check/lane.c"
#include "check/payload.c"
#include "check/table.c"
#include "check/repair.c"

#include "verify/talk.c"
#include "verify/litmus.c"
#include "verify/verify.c"

#include "router/prefix_tree.c"
#include "router/prefix.c"
#include "router/prefix_find.c"

#ifdef BL_SIM
#include "sim/verdict.c"
#include "sim/change.c"
#include "sim/order.c"
#include "sim/owner.c"
#include "sim/coherence.c"
#include "sim/raw.c"
#include "sim/cache.c"
#include "sim/device.c"
#include "sim/heartbeat.c"
#include "sim/turns.c"
#include "sim/dma.c"
#include "sim/verbs.c"
#include "sim/acts.c"
#include "sim/liveness.c"
#include "sim/run.c"

#include "sim/scenarios/litmus.c"
#include "sim/scenarios/litmus_acts.c"
#include "sim/scenarios/verify.c"
#include "sim/scenarios/paths.c"
#include "sim/scenarios/turns.c"
#include "sim/scenarios/blocks.c"
#include "sim/scenarios/kv.c"
#include "sim/scenarios/held.c"
#include "sim/scenarios/sessions.c"
#include "sim/scenarios/takeover.c"
#include "sim/scenarios/machines.c"
#include "sim/scenarios/tasks.c"
#include "sim/scenarios/range.c"
#include "sim/scenarios/plan.c"
#include "sim/scenarios/engine.c"
#include "sim/scenarios/engine_kv.c"
#include "sim/scenarios/register.c"
#include "sim/scenarios/words.c"
#include "sim/scenarios/damage.c"
#include "sim/scenarios/system.c"
#include "sim/scenarios/heartbeats.c"
#include "sim/scenarios/play.c"
#undef malloc
#undef calloc
#undef realloc
#undef free
#endif
