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

#include "base/lazy.h"
#include "base/seed.h"
#include "coherence/coherence.h"

enum { BL_BUCKET_KEYS = 3 };

typedef struct bl_bucket {
    uint64_t key[BL_BUCKET_KEYS][2];
    uint32_t taken[BL_BUCKET_KEYS];     /* block + 1; 0: empty */
    uint32_t passed;                    /* keys in later buckets for lack of room here */
} bl_bucket;

_Static_assert(sizeof(bl_bucket) == BL_LINE_SIZE, "bl_bucket is a line: one miss finds a key");

struct bl_hash {
    bl_bucket *bucket;
    uint64_t mask;              /* buckets - 1 */
    uint64_t seed[2];
    uint32_t count;
    uint32_t count_max;
};

int bl_hash_create(bl_hash **out, uint32_t count_max)
{
    /* At most two thirds of the slots are used, so few keys overflow. */
    uint64_t bucket_count = 1;
    while (bucket_count * BL_BUCKET_KEYS * 2 < (uint64_t)count_max * 3)
        bucket_count *= 2;
    bl_hash *hash = calloc(1, sizeof *hash);
    if (!hash)
        return -ENOMEM;
    hash->mask = bucket_count - 1;
    hash->count_max = count_max;
    int rc = bl_hash_seed(hash->seed);
    if (!rc && !(hash->bucket = bl_lazy_map_dense(bucket_count * sizeof *hash->bucket)))
        rc = -ENOMEM;
    if (rc)
        free(hash);
    else
        *out = hash;
    return rc;
}

void bl_hash_destroy(bl_hash *hash)
{
    if (!hash)
        return;
    bl_lazy_unmap(hash->bucket, (hash->mask + 1) * sizeof *hash->bucket);
    free(hash);
}

static uint64_t bl_hash_home(const bl_hash *hash, const uint64_t key[2])
{
    return bl_key_hash(hash->seed, key) & hash->mask;
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

void bl_hash_prefetch(const bl_hash *hash, const uint64_t key[2])
{
    bl_prefetch(&hash->bucket[bl_hash_home(hash, key)]);
}

int64_t bl_hash_find(const bl_hash *hash, const uint64_t key[2])
{
    uint64_t home = bl_hash_home(hash, key);
    for (uint64_t step = 0; step <= hash->mask; step++) {
        const bl_bucket *bucket = &hash->bucket[(home + step) & hash->mask];
        int place = bl_bucket_find(bucket, key);
        if (place >= 0)
            return (int64_t)bucket->taken[place] - 1;
        if (!bucket->passed)
            break;
    }
    return BL_NO_BLOCK;
}

int bl_hash_add(bl_hash *hash, const uint64_t key[2], uint32_t block)
{
    const bl_bucket *home = &hash->bucket[bl_hash_home(hash, key)];
    if (home->passed ? bl_hash_find(hash, key) != BL_NO_BLOCK : bl_bucket_find(home, key) >= 0)
        return -EEXIST;
    if (hash->count == hash->count_max)
        return -ENOSPC;
    for (uint64_t at = bl_hash_home(hash, key);; at = (at + 1) & hash->mask) {
        bl_bucket *bucket = &hash->bucket[at];
        for (int place = 0; place < BL_BUCKET_KEYS; place++) {
            if (bucket->taken[place])
                continue;
            bucket->key[place][0] = key[0];
            bucket->key[place][1] = key[1];
            bucket->taken[place] = block + 1;
            hash->count++;
            return 0;
        }
        bucket->passed++;
    }
}

int bl_hash_remove(bl_hash *hash, const uint64_t key[2])
{
    if (bl_hash_find(hash, key) == BL_NO_BLOCK)
        return -ENOENT;
    for (uint64_t at = bl_hash_home(hash, key);; at = (at + 1) & hash->mask) {
        bl_bucket *bucket = &hash->bucket[at];
        int place = bl_bucket_find(bucket, key);
        if (place >= 0) {
            bucket->taken[place] = 0;
            hash->count--;
            return 0;
        }
        bucket->passed--;
    }
}

uint32_t bl_hash_count(const bl_hash *hash) { return hash->count; }
