/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The hash table of index/hash.h, in buckets of one line. A key lies in its home bucket or, if that
 * is full, in the next bucket with room. Each bucket counts the keys that overflowed past it, and a
 * search ends at the first bucket with a count of zero. A removal lowers the counts and needs no
 * deleted markers. An attacker may choose keys, so the bucket depends on a secret seed.
 */
#include "index/hash.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/random.h>

#include "coherence/coherence.h"
#include "base/lazy.h"
#include "base/seed.h"

enum { BL_BUCKET_KEYS = 3 };

typedef struct bl_bucket {
    uint64_t key[BL_BUCKET_KEYS][2];
    uint32_t taken[BL_BUCKET_KEYS];     /* block + 1; 0: empty */
    uint32_t passed;                    /* keys in later buckets for lack of room here */
} bl_bucket;

_Static_assert(sizeof(bl_bucket) == BL_LINE_SIZE, "bl_bucket is a line: one miss finds a key");

struct bl_index {
    bl_bucket *bucket;
    uint64_t mask;              /* buckets - 1 */
    uint64_t seed[2];
    uint32_t count;
    uint32_t count_max;
};

int bl_index_create(bl_index **out, uint32_t count_max)
{
    /* At most two thirds of the slots are used, so few keys overflow. */
    uint64_t bucket_count = 1;
    while (bucket_count * BL_BUCKET_KEYS * 2 < (uint64_t)count_max * 3)
        bucket_count *= 2;
    bl_index *index = calloc(1, sizeof *index);
    if (!index)
        return -ENOMEM;
    index->mask = bucket_count - 1;
    index->count_max = count_max;
    int rc = bl_index_seed(index->seed);
    if (!rc && !(index->bucket = bl_lazy_map_dense(bucket_count * sizeof *index->bucket)))
        rc = -ENOMEM;
    if (rc)
        free(index);
    else
        *out = index;
    return rc;
}

void bl_index_destroy(bl_index *index)
{
    if (!index)
        return;
    bl_lazy_unmap(index->bucket, (index->mask + 1) * sizeof *index->bucket);
    free(index);
}

static uint64_t bl_index_home(const bl_index *index, const uint64_t key[2])
{
    return bl_key_hash(index->seed, key) & index->mask;
}

/* Return the key's place in a bucket, or -1. */
static int bl_bucket_find(const bl_bucket *bucket, const uint64_t key[2])
{
    for (int place = 0; place < BL_BUCKET_KEYS; place++)
        if (bucket->key[place][0] == key[0] && bucket->key[place][1] == key[1] &&
            bucket->taken[place])
            return place;
    return -1;
}

void bl_index_prefetch(const bl_index *index, const uint64_t key[2])
{
    bl_prefetch(&index->bucket[bl_index_home(index, key)]);
}

int64_t bl_index_find(const bl_index *index, const uint64_t key[2])
{
    uint64_t home = bl_index_home(index, key);
    for (uint64_t step = 0; step <= index->mask; step++) {
        const bl_bucket *bucket = &index->bucket[(home + step) & index->mask];
        int place = bl_bucket_find(bucket, key);
        if (place >= 0)
            return (int64_t)bucket->taken[place] - 1;
        if (!bucket->passed)
            break;
    }
    return BL_NO_BLOCK;
}

int bl_index_add(bl_index *index, const uint64_t key[2], uint32_t block)
{
    const bl_bucket *home = &index->bucket[bl_index_home(index, key)];
    if (home->passed ? bl_index_find(index, key) != BL_NO_BLOCK : bl_bucket_find(home, key) >= 0)
        return -EEXIST;
    if (index->count == index->count_max)
        return -ENOSPC;
    for (uint64_t at = bl_index_home(index, key);; at = (at + 1) & index->mask) {
        bl_bucket *bucket = &index->bucket[at];
        for (int place = 0; place < BL_BUCKET_KEYS; place++) {
            if (bucket->taken[place])
                continue;
            bucket->key[place][0] = key[0];
            bucket->key[place][1] = key[1];
            bucket->taken[place] = block + 1;
            index->count++;
            return 0;
        }
        bucket->passed++;
    }
}

int bl_index_remove(bl_index *index, const uint64_t key[2])
{
    if (bl_index_find(index, key) == BL_NO_BLOCK)
        return -ENOENT;
    for (uint64_t at = bl_index_home(index, key);; at = (at + 1) & index->mask) {
        bl_bucket *bucket = &index->bucket[at];
        int place = bl_bucket_find(bucket, key);
        if (place >= 0) {
            bucket->taken[place] = 0;
            index->count--;
            return 0;
        }
        bucket->passed--;
    }
}

uint32_t bl_index_count(const bl_index *index) { return index->count; }
