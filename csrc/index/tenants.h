/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Counts blocks by tenant (fingerprint of the namespace, and length) and refusals by reason.
 */
#ifndef BL_INDEX_TENANTS_H
#define BL_INDEX_TENANTS_H

#include "index/state.h"

/* Count a block that was committed, by a client of this server or of a predecessor. */
void bl_stat_committed(bl_index *index, uint32_t number);

/* Count a committed block that is removed from the index, and record the reason. */
void bl_stat_removed(bl_index *index, uint32_t number, enum bl_removal_reason why);

/* Count a grant that was refused with this error. */
void bl_stat_refused(bl_index *index, int status);

#endif
