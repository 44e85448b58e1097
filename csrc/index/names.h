/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The client's call that commits blocks with the engines' hashes of them (bl_name).
 */
#ifndef BL_NAMES_H
#define BL_NAMES_H

#include "api/index.h"

/* Commit written blocks as bl_commit_blocks() does, each with its name. */
int bl_commit_named(bl_session *session, const bl_named_commit *commits, uint32_t count,
                    int32_t *statuses, uint64_t timeout_ns);

#endif
