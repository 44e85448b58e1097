/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The state that the engines of one host share for a direction of a link. It remains valid when an
 * engine's process dies.
 *
 * Each member has one writer, its owner. All members write the counters of the bucket. In a capped
 * bucket, while no turn is odd, ceil - tail equals the limit minus the tokens that all members
 * hold. A process that dies between two updates breaks this equation, and the audit restores it. A
 * bucket that is not capped recovers with time.
 */
#ifndef BL_LINK_H
#define BL_LINK_H

#include "api/iosched.h"

/* Take a member for this process. Returns its index, or -ENOSPC. */
int bl_member_take(bl_direction *direction, uint64_t now_ns, uint64_t *owner);

/* Free the member and its tokens. */
void bl_member_drop(bl_direction *direction, uint32_t index, uint64_t owner);

/* Request tokens for this member (the result is a ticket), refund unused tokens, or release used
 * ones. */
uint64_t bl_member_grab(bl_direction *direction, bl_member *member, uint64_t tokens);
void bl_member_refund(bl_direction *direction, bl_member *member, uint64_t tokens);
void bl_member_release(bl_direction *direction, bl_member *member, uint64_t tokens);

/* Raise the limit of the bucket to at least this value, for an engine with larger pieces than
 * others. The limit never falls. */
void bl_member_widen(bl_direction *direction, bl_member *member, uint64_t limit);

/* Returns a mask of the classes that wait in other idle engines. *engines is the number of engines
 * with work, including this one. Engines that did not poll in time do not count. */
uint32_t bl_direction_demand(const bl_direction *direction, const bl_member *own, uint64_t now_ns,
                             uint32_t *engines);

/* Inspect the members if this is due, and correct the bucket if a process died. */
void bl_direction_watch(bl_direction *direction, uint64_t now_ns);

#endif
