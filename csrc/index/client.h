/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The calls of puts and gets, which need to know under which attachment they were answered: other
 * threads use the session, too.
 */
#ifndef BL_INDEX_CLIENT_H
#define BL_INDEX_CLIENT_H

#include "api/index.h"
#include "rpc/session_state.h"

/* Look up keys as bl_lookup() does. If it has hits, *under is who answered; all pins are those of
 * its nonce, or are gone. */
int64_t bl_lookup_under(bl_session *session, const uint64_t *keys, uint32_t count, uint32_t flags,
                        bl_block_record *records, uint32_t *state, bl_attachment *under,
                        uint64_t timeout_ns);

/* Reserve blocks as bl_reserve() does. *nonce has the grants. */
int bl_reserve_under(bl_session *session, const uint64_t *keys, uint32_t count,
                     const bl_block_request *what, bl_block_record *records, uint64_t *nonce,
                     uint64_t timeout_ns);

/* Commit written blocks as bl_commit_blocks() does, each with its name. */
int bl_commit_named(bl_session *session, const bl_named_commit *commits, uint32_t count,
                    int32_t *statuses, uint64_t timeout_ns);

#endif
