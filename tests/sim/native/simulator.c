/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The C core over the verbs of the simulator, and the simulator itself, in one piece, bottom folder
 * first (README.md has the list of folders). tests/native compiles it as the extension _sim.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define BL_SIM 1

#include "sim/native/heap.h"

#include "beluga.c"

#include "native/dsa_soft.c"

#include "sim/native/verdict.c"
#include "sim/native/change.c"
#include "sim/native/order.c"
#include "sim/native/owner.c"
#include "sim/native/coherence.c"
#include "sim/native/raw.c"
#include "sim/native/cache.c"
#include "sim/native/device.c"
#include "sim/native/heartbeat.c"
#include "sim/native/turns.c"
#include "sim/native/dma.c"
#include "sim/native/verbs.c"
#include "sim/native/acts.c"
#include "sim/native/liveness.c"
#include "sim/native/wake.c"
#include "sim/native/run.c"

#include "sim/native/scenarios/litmus.c"
#include "sim/native/scenarios/litmus_acts.c"
#include "sim/native/scenarios/verify.c"
#include "sim/native/scenarios/paths.c"
#include "sim/native/scenarios/turns.c"
#include "sim/native/scenarios/blocks.c"
#include "sim/native/scenarios/kv.c"
#include "sim/native/scenarios/held.c"
#include "sim/native/scenarios/sessions.c"
#include "sim/native/scenarios/asleep.c"
#include "sim/native/scenarios/doorbells.c"
#include "sim/native/scenarios/takeover.c"
#include "sim/native/scenarios/machines.c"
#include "sim/native/scenarios/tasks.c"
#include "sim/native/scenarios/names.c"
#include "sim/native/scenarios/below.c"
#include "sim/native/scenarios/range.c"
#include "sim/native/scenarios/plan.c"
#include "sim/native/scenarios/engine.c"
#include "sim/native/scenarios/engine_kv.c"
#include "sim/native/scenarios/register.c"
#include "sim/native/scenarios/words.c"
#include "sim/native/scenarios/damage.c"
#include "sim/native/scenarios/system.c"
#include "sim/native/scenarios/heartbeats.c"
#include "sim/native/scenarios/play.c"

#undef malloc
#undef calloc
#undef realloc
#undef free
