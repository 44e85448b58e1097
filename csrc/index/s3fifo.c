/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The queues and ghosts of index/s3fifo.h. The ghosts are a direct-mapped table. A ghost expires
 * when as many newer ghosts exist as there are blocks in the queues.
 */
#include "index/s3fifo.h"

#include <errno.h>
#include <stdlib.h>

#include "index/ring.h"

enum { BL_S3FIFO_USES_MAX = 3, BL_S3FIFO_SMALL_PART = 10 };

typedef struct bl_s3fifo_note {
    uint64_t hash;
    uint8_t uses;               /* hits since it entered its queue, at most BL_S3FIFO_USES_MAX */
    uint8_t list;               /* its queue, BL_RING_MAIN or BL_RING_SMALL; 0: not assigned */
    uint8_t may_go;             /* in a queue and not pinned */
} bl_s3fifo_note;

typedef struct bl_ghost {
    uint32_t tag;               /* upper half of the hash; the lower half selects the slot */
    uint32_t number;            /* sequence number of the ghost; 0: none */
} bl_ghost;

struct bl_s3fifo {
    bl_ring ring;
    bl_s3fifo_note *notes;      /* by id */
    bl_ghost *ghosts;           /* by hash */
    uint32_t id_count;
    uint32_t ghost_mask;
    uint32_t ghost_number;      /* the last sequence number of a ghost */
    uint32_t counts[3];         /* ids in each queue, by list */
    uint32_t may_go_counts[3];  /* of these, the ids that are not pinned */
};

int bl_s3fifo_create(bl_s3fifo **out, uint32_t id_count)
{
    bl_s3fifo *order = calloc(1, sizeof *order);
    if (!order)
        return -ENOMEM;
    uint64_t ghosts = 1;
    while (ghosts < id_count)
        ghosts *= 2;
    order->id_count = id_count;
    order->ghost_mask = (uint32_t)(ghosts - 1);
    order->notes = bl_lazy_map_dense(((size_t)id_count + 1) * sizeof *order->notes);
    order->ghosts = bl_lazy_map(ghosts * sizeof *order->ghosts);
    if (!order->notes || !order->ghosts || bl_ring_create(&order->ring, id_count) < 0) {
        bl_s3fifo_destroy(order);
        return -ENOMEM;
    }
    *out = order;
    return 0;
}

void bl_s3fifo_destroy(bl_s3fifo *order)
{
    if (order->ring.node)
        bl_ring_destroy(&order->ring);
    bl_lazy_unmap(order->notes, ((size_t)order->id_count + 1) * sizeof *order->notes);
    bl_lazy_unmap(order->ghosts, ((size_t)order->ghost_mask + 1) * sizeof *order->ghosts);
    free(order);
}

static uint32_t bl_s3fifo_count(const bl_s3fifo *order)
{
    return order->counts[BL_RING_MAIN] + order->counts[BL_RING_SMALL];
}

static void bl_s3fifo_let_go(bl_s3fifo *order, uint32_t id, int may_go)
{
    bl_s3fifo_note *note = &order->notes[id];
    order->may_go_counts[note->list] += (uint32_t)may_go - note->may_go;
    note->may_go = (uint8_t)may_go;
}

/* Remove an id from its queue. */
static void bl_s3fifo_leave(bl_s3fifo *order, uint32_t id)
{
    bl_s3fifo_let_go(order, id, 0);
    if (bl_ring_has(&order->ring, id)) {
        bl_ring_remove(&order->ring, id);
        order->counts[order->notes[id].list]--;
    }
}

/* Make an id the newest of a queue. */
static void bl_s3fifo_enter(bl_s3fifo *order, uint32_t list, uint32_t id)
{
    bl_s3fifo_leave(order, id);
    order->notes[id].list = (uint8_t)list;
    bl_ring_touch(&order->ring, list, id);
    order->counts[list]++;
}

static bl_ghost *bl_s3fifo_ghost(bl_s3fifo *order, uint64_t hash)
{
    return &order->ghosts[hash & order->ghost_mask];
}

void bl_s3fifo_assign(bl_s3fifo *order, uint32_t id, uint64_t hash)
{
    const bl_ghost *ghost = bl_s3fifo_ghost(order, hash);
    int known = ghost->number && ghost->tag == (uint32_t)(hash >> 32) &&
                order->ghost_number - ghost->number < bl_s3fifo_count(order);
    bl_s3fifo_leave(order, id);
    order->notes[id] = (bl_s3fifo_note){.hash = hash, .list = known ? BL_RING_MAIN : BL_RING_SMALL};
}

void bl_s3fifo_touch(bl_s3fifo *order, uint32_t id)
{
    bl_s3fifo_note *note = &order->notes[id];
    if (!bl_ring_has(&order->ring, id))
        bl_s3fifo_enter(order, note->list ? note->list : BL_RING_SMALL, id);
    else if (note->uses < BL_S3FIFO_USES_MAX)
        note->uses++;
    bl_s3fifo_let_go(order, id, 1);
}

void bl_s3fifo_cool(bl_s3fifo *order, uint32_t id)
{
    bl_s3fifo_leave(order, id);
    order->notes[id].uses = 0;
    order->notes[id].list = BL_RING_MAIN;
    bl_ring_cool(&order->ring, BL_RING_MAIN, id);
    order->counts[BL_RING_MAIN]++;
    bl_s3fifo_let_go(order, id, 1);
}

void bl_s3fifo_remove(bl_s3fifo *order, uint32_t id) { bl_s3fifo_let_go(order, id, 0); }

void bl_s3fifo_forget(bl_s3fifo *order, uint32_t id)
{
    bl_s3fifo_note *note = &order->notes[id];
    if (note->list == BL_RING_SMALL && note->uses == 0 && bl_ring_has(&order->ring, id))
        *bl_s3fifo_ghost(order, note->hash) =
            (bl_ghost){(uint32_t)(note->hash >> 32), ++order->ghost_number};
    bl_s3fifo_leave(order, id);
    *note = (bl_s3fifo_note){0};
}

int bl_s3fifo_has(const bl_s3fifo *order, uint32_t id) { return order->notes[id].may_go; }

/* Return the queue to evict from: the small one while it exceeds its share. A queue with only
 * pinned blocks is skipped. */
static uint32_t bl_s3fifo_turn(const bl_s3fifo *order)
{
    uint32_t small = order->counts[BL_RING_SMALL];
    if (!order->may_go_counts[BL_RING_MAIN] || !order->may_go_counts[BL_RING_SMALL])
        return order->may_go_counts[BL_RING_MAIN] ? BL_RING_MAIN : BL_RING_SMALL;
    return (uint64_t)small * BL_S3FIFO_SMALL_PART > bl_s3fifo_count(order) ? BL_RING_SMALL
                                                                          : BL_RING_MAIN;
}

/* The loop terminates: a block of the small queue moves once, and each round through the main queue
 * decrements the uses of its unpinned blocks. */
int64_t bl_s3fifo_coldest(bl_s3fifo *order)
{
    while (order->may_go_counts[BL_RING_MAIN] + order->may_go_counts[BL_RING_SMALL]) {
        uint32_t list = bl_s3fifo_turn(order), id;
        id = (uint32_t)bl_ring_coldest(&order->ring, list);
        bl_s3fifo_note *note = &order->notes[id];
        int may_go = note->may_go;
        if (may_go && !note->uses)
            return id;
        if (list == BL_RING_SMALL)
            note->uses = 0;
        else if (may_go)
            note->uses--;
        bl_s3fifo_enter(order, BL_RING_MAIN, id);
        bl_s3fifo_let_go(order, id, may_go);
    }
    return -1;
}

/* Return the next id at or after one, which is a ring's negative number at the end of its list. */
static int64_t bl_s3fifo_skip(const bl_s3fifo *order, int64_t id)
{
    while (id >= 0 && !order->notes[id].may_go)
        id = bl_ring_warmer(&order->ring, (uint32_t)id);
    return id;
}

int64_t bl_s3fifo_warmer(const bl_s3fifo *order, uint32_t id)
{
    uint32_t turn = bl_s3fifo_turn(order), list = order->notes[id].list;
    int64_t next = bl_s3fifo_skip(order, bl_ring_warmer(&order->ring, id));
    if (next >= 0 || list != turn)
        return next;
    uint32_t other = list == BL_RING_MAIN ? BL_RING_SMALL : BL_RING_MAIN;
    return bl_s3fifo_skip(order, bl_ring_coldest(&order->ring, other));
}
