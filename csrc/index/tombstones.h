/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Tombstones: removals that a lower tier has not executed yet (index/tombstones.c). Tiers are bits,
 * as bl_tier_bit has them, or their numbers n from 1 to 7.
 */
#ifndef BL_TOMBSTONES_H
#define BL_TOMBSTONES_H

#include "index/state.h"

enum {
    BL_TOMBSTONE_TIERS = 8,          /* this server's tiers have the numbers 1 to 7, */
    BL_TOMBSTONE_STORES = 64         /* other tiers 8 to 63 */
};

enum bl_tombstone_state {
    BL_TOMBSTONE_PARKED,             /* this server does not have the tier */
    BL_TOMBSTONE_WAITING,            /* the service has not tried it */
    BL_TOMBSTONE_TAKEN,              /* the service is executing it */
    BL_TOMBSTONE_FAILED,             /* the attempt failed */
    BL_TOMBSTONE_STATES
};

int bl_tombstones_create(bl_index *index);
void bl_tombstones_destroy(bl_index *index);

/* Set the ids of the lower tiers, before the server serves: id[n] is unique to tier n; 0: there is
 * no such tier. */
void bl_tombstones_attach(bl_index *index, const uint64_t id[BL_TOMBSTONE_TIERS]);

/* Abandon a tier that this server does not have, before the server serves: recovery drops its line
 * and its tombstones. Returns 0, or -ENOSPC for more than BL_TOMBSTONE_STORES. */
int bl_tombstones_give_up(bl_index *index, uint64_t id);

/* Recover a predecessor's line of a tier, which was copied into the block of this number. Returns 0
 * if the tier was abandoned. */
int bl_tombstones_recover_tier(bl_index *index, uint32_t number);

/* Return a tier of this server that has no line yet, or 0. */
uint32_t bl_tombstones_unmarked(const bl_index *index);

/* Write a tier's line. Returns 0, or -BL_ERROR_REMOVALS_FULL if there are too many tiers. */
int bl_tombstones_mark(bl_index *index, uint32_t tier, uint32_t number);

/* Return how many unused numbers the tombstones of a key need, or -BL_ERROR_REMOVALS_FULL. lane is
 * the caller's, whose share is bounded. */
int bl_tombstones_needed(const bl_index *index, const uint64_t key[2], uint32_t lane);

/* Write a key's tombstones: one for each tier that may have blocks of the pool, whether this server
 * has the tier or not. Existing ones are renewed. numbers has bl_tombstones_needed() elements. */
void bl_tombstones_add(bl_index *index, const uint64_t key[2], uint32_t lane,
                       const uint32_t *numbers);

/* A session has ended: its tombstones count for no session. */
void bl_tombstones_lane_gone(bl_index *index, uint32_t lane);

/* Recover a predecessor's tombstone, which was copied into the block of this number. Returns 0 if
 * there are too many. */
int bl_tombstones_recover(bl_index *index, uint32_t number);

/* Return the tiers that may still have a removed block of a key, as bits. */
uint8_t bl_tombstones_of(const bl_index *index, const uint64_t key[2]);

/* Return the tiers that have not tried a removal yet, as bits. */
uint8_t bl_tombstones_untried(const bl_index *index, const uint64_t key[2]);

/* Return 1 if there is a tombstone in this state. */
int bl_tombstones_has(const bl_index *index, enum bl_tombstone_state state);

/* Take a tombstone that waits, or, if tier is not 0, the oldest one that failed in this tier.
 * Returns 0 if there is none. */
int bl_tombstones_take(bl_index *index, uint32_t tier, bl_lower_record *out);

/* Record the result of a removal. Returns the tier as a bit; 0: there is no such tombstone. */
uint8_t bl_tombstones_tried(bl_index *index, const bl_lower_note *note);

/* Record that these tiers now have a key's block of this generation, in place of the removed
 * one. */
void bl_tombstones_replaced(bl_index *index, const uint64_t key[2], uint8_t tiers,
                            uint64_t generation);

/* Return all taken tombstones to the state WAITING. */
void bl_tombstones_untake(bl_index *index);

/* Return the number of lines of tiers. */
uint32_t bl_tombstones_tier_count(const bl_index *index);

/* Return the number of tombstones: all, those in a state, and the maximum. */
uint32_t bl_tombstones_count(const bl_index *index);
uint32_t bl_tombstones_count_in(const bl_index *index, enum bl_tombstone_state state);
uint32_t bl_tombstones_max(const bl_index *index);

#endif
