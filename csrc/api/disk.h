/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A store of blocks on a disk: the index of one file (bl_store), and the requests that move blocks
 * between memory and the file (bl_disk). beluga/tiers/disk joins the two.
 *
 * The file has a header, the index, and the data. The index is a table of slots of 64 bytes, which
 * disk/entry.h draws; a slot has the entry of one block, or zeros. The data are stripes, and
 * space/pages.h gives their pages to blocks.
 *
 * The life of a block: reserve gives it a slot and space; its bytes are written; fill makes its
 * entry, which the next write of the index's sector contains; commit makes it visible to readers.
 * abort releases everything at any point before. An entry that is cleared (evicted, removed) is
 * written before its space gets other bytes: the caller writes all dirty sectors between reserve
 * and the first byte.
 */
#ifndef BL_API_STORE_H
#define BL_API_STORE_H

#include <stdint.h>

enum bl_store_constant {
    BL_STORE_ENTRY_SIZE = 64,
    BL_STORE_SECTOR_SIZE = 4096,        /* the index is written in these */
    BL_STORE_SECTOR_SLOTS = 64
};

typedef struct bl_store bl_store;

/* A block as callers describe it; BLOCK in beluga/tiers/tier.py is the same. */
typedef struct bl_store_record {
    uint64_t key[2];
    uint64_t fingerprint;
    uint32_t length;            /* bytes of payload */
    uint32_t chunk_size;        /* bytes of payload of each checksum in the pool */
} bl_store_record;

/* Where a block lies. */
typedef struct bl_store_place {
    uint64_t offset;            /* in the file */
    uint32_t slot;
    uint32_t size;              /* bytes of the file, whole pages */
    uint32_t seed;              /* seed of the payload's CRC-32C: the CRC of the key */
    uint32_t crc;               /* of the payload */
    uint32_t state;             /* bl_store_state */
    uint32_t length;
} bl_store_place;

enum bl_store_state {
    BL_STORE_ABSENT,            /* find: a miss; reserve: no room */
    BL_STORE_PRESENT,           /* find: pinned; reserve: the block is stored */
    BL_STORE_GRANTED,           /* reserve: write it */
    BL_STORE_PENDING            /* another caller is writing it */
};

typedef struct bl_store_stat {
    uint64_t block_count;
    uint64_t block_bytes;       /* of payload */
    uint64_t used_bytes;        /* of space that blocks have */
    uint64_t data_bytes;        /* of space */
    uint64_t slot_count;
    uint64_t evicted_count;
    uint64_t damaged_count;     /* entries that recovery refused: damaged, or overwritten */
    uint64_t dirty_count;       /* sectors of the index that are not written yet */
} bl_store_stat;

/* Create an empty store. Entries are valid only in the store of this id. policy is one of
 * bl_evict_policy. 0, -ENOMEM, -EINVAL. */
int bl_store_create(bl_store **out, uint64_t id, uint32_t slot_count, uint64_t data_offset,
                    uint64_t stripe_count, uint32_t policy);
void bl_store_destroy(bl_store *store);

/* Recovery. The index of the file is read to these addresses, where it has the same offsets. First,
 * expect allocates memory for the blocks of that many sectors, the first ones. The thread that has
 * read a range of sectors checks their entries. Then one thread claims space and keys for the
 * blocks of the whole entries. When all are claimed, recover resolves conflicts of blocks over one
 * space or one key (the newest wins), and makes the order of eviction. Returns 0 or -ENOMEM. */
uint8_t *bl_store_entries(bl_store *store);
void bl_store_expect(bl_store *store, uint32_t sector_count);
void bl_store_check(bl_store *store, uint32_t sector, uint32_t count);
void bl_store_claim(bl_store *store, uint32_t sector, uint32_t count);
int bl_store_recover(bl_store *store);

/* Find blocks, and pin those that are stored. Returns how many; records gets their stored
 * records. */
int bl_store_find(bl_store *store, const uint64_t *keys, uint32_t count, bl_store_record *records,
                  bl_store_place *places);
void bl_store_unpin(bl_store *store, const bl_store_place *places, uint32_t count);

/* Return in found which blocks are stored (0 or 1), without marking them as used. */
void bl_store_has(bl_store *store, const uint64_t *keys, uint32_t count, uint8_t *found);

/* Reserve slots and space for blocks. Returns how many are GRANTED. The coldest blocks without
 * readers are evicted for them. */
int bl_store_reserve(bl_store *store, const bl_store_record *records, uint32_t count,
                     bl_store_place *places);

/* For the GRANTED blocks of these places: make entries, whose crc the caller has stored in places;
 * make them visible to readers; or release them. */
void bl_store_fill(bl_store *store, const bl_store_place *places, uint32_t count);
void bl_store_commit(bl_store *store, const bl_store_place *places, uint32_t count);
void bl_store_abort(bl_store *store, const bl_store_place *places, uint32_t count);

/* Remove blocks. Returns how many were stored. A pinned block keeps its space until it is released;
 * a block that is being written is removed by its commit and never visible to readers. */
int bl_store_remove(bl_store *store, const uint64_t *keys, uint32_t count);

/* List the keys of the stored blocks. Returns their number; up to room keys are written. */
uint32_t bl_store_keys(bl_store *store, uint64_t *keys, uint32_t room);

/* Take the keys of up to room blocks that were evicted since the last call. Returns how many. */
uint32_t bl_store_take_evicted(bl_store *store, uint64_t *keys, uint32_t room);

/* Take up to room dirty sectors of the index: their numbers and bytes. Returns how many. They are
 * then clean; after a failed write the caller marks them dirty again. */
uint32_t bl_store_take(bl_store *store, uint32_t *sectors, uint8_t *bytes, uint32_t room);
void bl_store_spoil(bl_store *store, const uint32_t *sectors, uint32_t count);

void bl_store_stat_read(bl_store *store, bl_store_stat *out);

/* ---- Requests */

typedef struct bl_disk bl_disk;

enum bl_disk_engine { BL_DISK_THREADS, BL_DISK_URING };

/* One range of the file. Requests that are adjacent in the array, in the file and in memory are
 * moved together. */
typedef struct bl_disk_request {
    uint64_t offset;            /* in the file; all three are multiples of a page */
    uint8_t *bytes;
    uint32_t size;
    uint32_t length;            /* the first bytes of it that crc covers; 0: no crc */
    uint32_t seed;
    uint32_t crc;               /* read: the expected CRC; write with a source: the result */
    int32_t result;             /* 0, or -errno; -EBADMSG: another crc; -ENODATA: end of the file */
    uint32_t reserved;
    const uint8_t *source;      /* write: NULL, or length bytes that are copied to bytes first,
                                 * followed by zeros; equal to bytes: nothing is copied */
} bl_disk_request;

/* Prepare requests on an open file, at most depth of them in flight for each call. Returns 0 or
 * -errno, for BL_DISK_URING the kernel's (-ENOSYS, -EPERM). */
int bl_disk_create(bl_disk **out, int file, uint32_t engine, uint32_t depth);
void bl_disk_destroy(bl_disk *disk);

/* Execute requests, which get their results. Returns 0, or -errno with nothing done. Reads have
 * priority: during reads and shortly after, few and small writes are admitted. */
int bl_disk_read(bl_disk *disk, bl_disk_request *requests, uint32_t count);
int bl_disk_write(bl_disk *disk, bl_disk_request *requests, uint32_t count);

/* Make completed writes durable (fdatasync). Returns 0 or -errno. */
int bl_disk_sync(bl_disk *disk);

#endif
