/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The end of a run, and the reports of oracles: the first verdict counts.
 */
#ifndef BL_SIM_VERDICT_H
#define BL_SIM_VERDICT_H

#include "sim/native/world.h"

/* Switch to another process, or to the caller of bl_sim_world_run if that is NULL. */
void bl_sim_switch_to(bl_sim_world *world, bl_sim_process *to);

/* End the run with this result. */
void bl_sim_stop(bl_sim_world *world, int32_t result);

/* End the run with an oracle's verdict; the first one counts. */
void bl_sim_fail(bl_sim_world *world, int32_t error, const char *report);

/* Report a verdict of an oracle: of process at site, against writer, judged at mark. writer and
 * mark may be NULL. */
void bl_sim_accuse(bl_sim_world *world, int32_t error, const char *what,
                   const bl_sim_process *process, const bl_site *site, const bl_site *writer,
                   const bl_site *mark, uint32_t line);

#endif
