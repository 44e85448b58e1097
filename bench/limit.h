/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The machine's limit: the same work as Beluga's, done by bare instructions on bare addresses. cffi
 * reads this file, so it has only prototypes. Functions return 0 or a negative errno.
 */
#ifndef LIMIT_H
#define LIMIT_H

#include <stdint.h>

/* Operations on size bytes at base + offset; buffer is private memory. All have one type, so that
 * one stopwatch times them and Beluga's verbs. Offsets and sizes are multiples of a line. */
int limit_write(const void *base, uint64_t offset, void *buffer, uint64_t size);
int limit_read(const void *base, uint64_t offset, void *buffer, uint64_t size);
int limit_load(const void *base, uint64_t offset, void *buffer, uint64_t size);
int limit_store(const void *base, uint64_t offset, void *buffer, uint64_t size);
int limit_store_clflush(const void *base, uint64_t offset, void *buffer, uint64_t size);
int limit_store_clflushopt(const void *base, uint64_t offset, void *buffer, uint64_t size);
int limit_store_clwb(const void *base, uint64_t offset, void *buffer, uint64_t size);

/* The features of this CPU, including those that Beluga's settings disable. */
int limit_has_clflushopt(void);
int limit_has_clwb(void);

/* Rows of one size, with the address of each in private memory and in the pool. */
typedef struct limit_rows {
    const uint64_t *private_places; /* addresses, aligned to lines or not */
    const uint64_t *pool_places;    /* addresses; aligned to lines for limit_gather */
    uint64_t size;                  /* of each row; a multiple of a line */
} limit_rows;

/* Operations on size bytes of rows, from row number first on. gather streams rows to the pool;
 * scatter drops the rows' lines, then copies the rows out. context is a limit_rows; buffer is not
 * used. */
int limit_gather(const void *context, uint64_t first, void *buffer, uint64_t size);
int limit_scatter(const void *context, uint64_t first, void *buffer, uint64_t size);

/* An exchange of lines between two processes: each line has one line in reply, and only a sequence
 * number. The lines of both directions are stride bytes apart; line n is slot n % slots. */
typedef struct limit_lines {
    uint8_t *requests;
    uint8_t *replies;
    uint32_t slots;             /* a power of two */
    uint32_t stride;
    uint32_t coherent;          /* 1: plain stores and no invalidations, but fences */
    uint32_t depth;             /* lines out at a time; 1 is a ping-pong */
    uint32_t batch;             /* lines that share a fence; at most depth, which it divides */
    uint32_t sequence;          /* of the first line; no slot has held it before */
    uint64_t count;             /* lines in each direction; a multiple of batch */
    uint64_t timeout_ns;
} limit_lines;

/* Run one of the two sides. Returns -ETIMEDOUT when the other one is silent for that long. */
int limit_request(const limit_lines *lines);
int limit_answer(const limit_lines *lines);

/* A table of lines, each with a key in its first two words. It is read once from end to end, and
 * every key goes into an index with the line's number. */
typedef int (*limit_insert)(void *index, const uint64_t *key, uint32_t number);

typedef struct limit_table {
    const uint8_t *const *pieces;   /* the table's pieces, in order */
    uint64_t piece_lines;           /* in each of them */
    uint64_t first;                 /* line of the first piece */
    uint64_t lines;
    uint32_t coherent;              /* 1: lines are not invalidated before they are read */
    limit_insert insert;
    void *index;
} limit_table;

/* Scan the table. Returns 0, or the first error of insert. */
int limit_scan(const limit_table *table);

/* A minimal hash table of 64-bit keys with open addressing, which uses the next free slot. 0 is not
 * a key. */
typedef struct limit_slot {
    uint64_t key;
    uint64_t value;
} limit_slot;

typedef struct limit_hash {
    limit_slot *slot;           /* zeroed */
    uint64_t slots;             /* a power of two, more than there are keys */
} limit_hash;

void limit_hash_put(const limit_hash *hash, const uint64_t *keys, uint64_t count);

/* Look up one key after the other. Returns the sum of the values. */
uint64_t limit_hash_walk(const limit_hash *hash, const uint64_t *keys, uint64_t count);

/* A bare index of keys of two words (csrc/index/hash.h), without anything around it. */
typedef void (*limit_prefetch)(const void *index, const uint64_t *key);
typedef int64_t (*limit_find)(const void *index, const uint64_t *key);
typedef int (*limit_remove)(void *index, const uint64_t *key);

typedef struct limit_index {
    void *index;
    limit_prefetch prefetch;
    limit_find find;
    limit_insert insert;
    limit_remove remove;
} limit_index;

/* Look up count keys, each prefetched some keys ahead. Returns the number of hits. */
uint64_t limit_index_walk(const limit_index *index, const uint64_t *keys, uint64_t count);

/* Remove count old keys, or none if old is NULL, and insert as many others with the numbers from 0
 * on. Returns 0, or the first error. */
int limit_index_replace(const limit_index *index, const uint64_t *old, const uint64_t *keys,
                        uint64_t count);

#endif
