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
 * The life of a block: reserve allocates a slot and space; the caller writes its bytes; fill makes
 * its entry, which is part of the next write of its index sector; commit makes it visible to
 * readers. abort releases everything at any point before commit. A cleared entry (evicted or
 * removed) must be on disk before its space is overwritten, so the caller writes all dirty sectors
 * between reserve and the first byte.
 */
#ifndef BL_API_STORE_H
#define BL_API_STORE_H

#include <stdint.h>

enum bl_store_constant {
    BL_STORE_ENTRY_SIZE = 64,
    BL_STORE_SECTOR_SIZE = 4096,        /* unit in which the index is written */
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

/* The place of a block in the file. */
typedef struct bl_store_place {
    uint64_t offset;            /* in the file */
    uint32_t slot;
    uint32_t size;              /* bytes in the file, whole pages */
    uint32_t seed;              /* seed of the payload's CRC-32C: the CRC of the key */
    uint32_t crc;               /* of the payload */
    uint32_t state;             /* bl_store_state */
    uint32_t length;
} bl_store_place;

enum bl_store_state {
    BL_STORE_ABSENT,            /* find: miss; reserve: no room */
    BL_STORE_PRESENT,           /* find: hit, pinned; reserve: stored already */
    BL_STORE_GRANTED,           /* reserve: the caller writes it */
    BL_STORE_PENDING            /* another caller is writing it */
};

typedef struct bl_store_stat {
    uint64_t block_count;
    uint64_t block_bytes;       /* of payload */
    uint64_t used_bytes;        /* space in use */
    uint64_t data_bytes;        /* space in total */
    uint64_t slot_count;
    uint64_t evicted_count;
    uint64_t damaged_count;     /* entries that recovery rejected: damaged or overwritten */
    uint64_t dirty_count;       /* index sectors not written yet */
} bl_store_stat;

/* Create an empty store. The check of an entry includes the store's id. policy is a
 * bl_evict_policy. Returns 0, -ENOMEM or -EINVAL. */
int bl_store_create(bl_store **out, uint64_t id, uint32_t slot_count, uint64_t data_offset,
                    uint64_t stripe_count, uint32_t policy);
void bl_store_destroy(bl_store *store);

/* Recovery. First, expect allocates memory for the blocks of the first sectors. The caller reads
 * the file's index into bl_store_entries(), at the same offsets; the thread that has read a range
 * of sectors checks their entries. One thread then claims space and keys for the blocks with valid
 * entries. Finally, recover resolves conflicts over space or keys (the newest block wins) and
 * builds the eviction order. Returns 0 or -ENOMEM. */
uint8_t *bl_store_entries(bl_store *store);
void bl_store_expect(bl_store *store, uint32_t sector_count);
void bl_store_check(bl_store *store, uint32_t sector, uint32_t count);
void bl_store_claim(bl_store *store, uint32_t sector, uint32_t count);
int bl_store_recover(bl_store *store);

/* Find blocks, and pin those that are stored. Returns how many; their records are copied to
 * records. */
int bl_store_find(bl_store *store, const uint64_t *keys, uint32_t count, bl_store_record *records,
                  bl_store_place *places);
void bl_store_unpin(bl_store *store, const bl_store_place *places, uint32_t count);

/* Set found[i] to 1 if block i is stored, else 0; the eviction order does not change. */
void bl_store_has(bl_store *store, const uint64_t *keys, uint32_t count, uint8_t *found);

/* Reserve slots and space for blocks, and evict the coldest blocks without readers where that is
 * necessary. Returns how many are GRANTED. */
int bl_store_reserve(bl_store *store, const bl_store_record *records, uint32_t count,
                     bl_store_place *places);

/* For GRANTED blocks: make their entries, with the crc that the caller has put into places; make
 * the blocks visible to readers; or release them. */
void bl_store_fill(bl_store *store, const bl_store_place *places, uint32_t count);
void bl_store_commit(bl_store *store, const bl_store_place *places, uint32_t count);
void bl_store_abort(bl_store *store, const bl_store_place *places, uint32_t count);

/* Remove blocks. Returns how many were stored. A pinned block keeps its space until it is released;
 * a block that is being written is removed by its commit and never visible to readers. */
int bl_store_remove(bl_store *store, const uint64_t *keys, uint32_t count);

/* List the keys of the stored blocks. Returns their number; up to room keys are written. */
uint32_t bl_store_keys(bl_store *store, uint64_t *keys, uint32_t room);

/* Return the keys of up to room blocks that were evicted, each key once. Returns how many. */
uint32_t bl_store_take_evicted(bl_store *store, uint64_t *keys, uint32_t room);

/* Take the numbers and bytes of up to room dirty index sectors, which are then clean; after a
 * failed write the caller marks them dirty again. Returns how many. */
uint32_t bl_store_take(bl_store *store, uint32_t *sectors, uint8_t *bytes, uint32_t room);
void bl_store_mark_dirty(bl_store *store, const uint32_t *sectors, uint32_t count);

void bl_store_stat_read(bl_store *store, bl_store_stat *out);

/* ---- Requests */

typedef struct bl_disk bl_disk;

enum bl_disk_engine { BL_DISK_THREADS, BL_DISK_URING };

/* One range of the file. Requests that are adjacent in the array, in the file and in memory are
 * merged into one I/O. */
typedef struct bl_disk_request {
    uint64_t offset;            /* in the file; all three are multiples of a page */
    uint8_t *bytes;
    uint32_t size;
    uint32_t length;            /* the first bytes of the range, covered by crc; 0: no crc */
    uint32_t seed;
    uint32_t crc;               /* read: the expected CRC; write with a source: the result */
    int32_t result;             /* 0, or -errno; -EBADMSG: another crc; -ENODATA: end of the file */
    uint32_t reserved;
    const uint8_t *source;      /* write: NULL, or length bytes to copy to bytes first, followed
                                 * by zeros; equal to bytes: no copy */
} bl_disk_request;

/* Set up requests on an open file, with up to depth of them in flight per call. Returns 0 or
 * -errno; for BL_DISK_URING that of the kernel (-ENOSYS, -EPERM). */
int bl_disk_create(bl_disk **out, int file, uint32_t engine, uint32_t depth);
void bl_disk_destroy(bl_disk *disk);

/* Execute requests and set their results. Returns 0, or -errno if none was started. Reads have
 * priority: during reads and shortly after, only few and small writes are admitted. */
int bl_disk_read(bl_disk *disk, bl_disk_request *requests, uint32_t count);
int bl_disk_write(bl_disk *disk, bl_disk_request *requests, uint32_t count);

/* Make completed writes durable (fdatasync). Returns 0 or -errno. */
int bl_disk_sync(bl_disk *disk);

#endif
