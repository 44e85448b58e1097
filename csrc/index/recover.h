/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Recovers the block index in a takeover (D5), once, after the epoch is published and before the
 * server serves.
 */
#ifndef BL_INDEX_RECOVER_H
#define BL_INDEX_RECOVER_H

#include "index/state.h"

int bl_recover(void *context, uint64_t old_epoch, int suspect);

/* Return the reason that an entry with a right check still cannot be used, or NULL. */
const char *bl_entry_invalid(const bl_geometry *g, const bl_entry *entry);

#endif
