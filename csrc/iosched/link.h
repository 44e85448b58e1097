/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * What the engines of one host share of a link's direction, and how it outlives any of them.
 *
 * Every seat has one writer, its owner. The bucket's counters are everybody's. Capped, and with no
 * turn odd, ceil - tail is the limit less all that seats hold: whoever died between two counters
 * has broken this by what he moved, and the audit restores it. Not capped, time makes it good.
 */
#ifndef BL_LINK_H
#define BL_LINK_H

#include "api/iosched.h"

/* Take a seat for this process: its index, or -ENOSPC. */
int bl_seat_take(bl_way *way, uint64_t now_ns, uint64_t *owner);

/* Give it back, with what it holds. */
void bl_seat_drop(bl_way *way, uint32_t index, uint64_t owner);

/* Ask for tokens, for this seat: a ticket. Give back what was not used, or release what was. */
uint64_t bl_seat_grab(bl_way *way, bl_seat *seat, uint64_t tokens);
void bl_seat_refund(bl_way *way, bl_seat *seat, uint64_t tokens);
void bl_seat_release(bl_way *way, bl_seat *seat, uint64_t tokens);

/* Have the bucket hold at least so many: engines that ask for more at a time than others need a
 * larger one. It is never made smaller. */
void bl_seat_widen(bl_way *way, bl_seat *seat, uint64_t limit);

/* The classes that free engines wait for, this one's apart, and how many engines there are with
 * work to do, this one included. Those that have not asked in time do not count. */
uint32_t bl_way_demand(const bl_way *way, const bl_seat *own, uint64_t now_ns,
                          uint32_t *engines);

/* Look the seats over, if nobody has for a while; and put the bucket right, if somebody died. */
void bl_way_watch(bl_way *way, uint64_t now_ns);

#endif
