/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * What the engines of one host share of a link's direction, and how it outlives any of them.
 *
 * Every member has one writer, its owner. The bucket's counters are everybody's. Capped, and with
 * no turn odd, ceil - tail is the limit less all that members hold: whoever died between two
 * counters has broken this by what he moved, and the audit restores it. Not capped, time makes it
 * good.
 */
#ifndef BL_LINK_H
#define BL_LINK_H

#include "api/iosched.h"

/* Take a member for this process: its index, or -ENOSPC. */
int bl_member_take(bl_direction *way, uint64_t now_ns, uint64_t *owner);

/* Give it back, with what it holds. */
void bl_member_drop(bl_direction *way, uint32_t index, uint64_t owner);

/* Ask for tokens, for this member: a ticket. Give back what was not used, or release what was. */
uint64_t bl_member_grab(bl_direction *way, bl_member *member, uint64_t tokens);
void bl_member_refund(bl_direction *way, bl_member *member, uint64_t tokens);
void bl_member_release(bl_direction *way, bl_member *member, uint64_t tokens);

/* Have the bucket hold at least so many: engines that ask for more at a time than others need a
 * larger one. It is never made smaller. */
void bl_member_widen(bl_direction *way, bl_member *member, uint64_t limit);

/* The classes that free engines wait for, this one's apart, and how many engines there are with
 * work to do, this one included. Those that have not asked in time do not count. */
uint32_t bl_direction_demand(const bl_direction *way, const bl_member *own, uint64_t now_ns,
                          uint32_t *engines);

/* Look the members over, if nobody has for a while; and put the bucket right, if somebody died. */
void bl_direction_watch(bl_direction *way, uint64_t now_ns);

#endif
