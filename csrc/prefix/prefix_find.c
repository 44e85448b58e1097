/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Finds the longest prefixes in the tree (api/prefix.h), in one walk for all ranks: each rank has a
 * bit in the mask of its phase (its current tier). At every block, the ranks that do not hold it
 * there move on to the next phase.
 */
#include "prefix/prefix_tree.h"

enum {
    BL_PREFIX_AHEAD = 15,       /* blocks between two stages of a walk, so that misses overlap */
    BL_PREFIX_RING = 32,        /* a power of two, more than two stages */
    BL_PREFIX_POOL = 3,         /* the phase after the last tier: blocks of the pool */
    BL_PREFIX_PHASES = 4,
    BL_PREFIX_WORDS = BL_PREFIX_RANKS_MAX / 64
};

typedef struct bl_prefix_walk {
    const bl_prefix *prefix;
    uint64_t phase[BL_PREFIX_PHASES][BL_PREFIX_WORDS];
    uint32_t end[BL_PREFIX_RANKS_MAX][BL_PREFIX_PHASES];
} bl_prefix_walk;

/* Handle a block at which some of 64 ranks change their phase. */
static void bl_prefix_shift(bl_prefix_walk *walk, const uint64_t *held, uint32_t words,
                            uint32_t word, uint32_t depth)
{
    uint64_t leaving = 0, pool = held[0] & 1u << BL_PREFIX_SHARED ? UINT64_MAX : 0;
    for (uint32_t phase = 0; phase < BL_PREFIX_PHASES; phase++) {
        uint64_t here = walk->phase[phase][word] | leaving;
        uint64_t has = phase == BL_PREFIX_POOL ? pool : held[phase * words + word];
        walk->phase[phase][word] = here & has;
        leaving = here & ~has;
        for (uint64_t left = leaving; left; left &= left - 1)
            walk->end[word * 64 + (uint32_t)__builtin_ctzll(left)][phase] = depth;
    }
}

/* Return 1 if any rank continues; with early, only if a second one does, not counting blocks of the
 * pool. */
static inline int bl_prefix_step(bl_prefix_walk *walk, const uint64_t *held, uint32_t words,
                                 uint32_t depth, int early)
{
    uint64_t any = 0;
    uint32_t own = 0;
    for (uint32_t word = 0; word < words; word++) {
        uint64_t device = walk->phase[0][word];
        uint64_t later = walk->phase[1][word] | walk->phase[2][word] | walk->phase[3][word];
        if (device & ~held[word] || later)
            bl_prefix_shift(walk, held, words, word, depth);
        uint64_t mine = walk->phase[0][word] | walk->phase[1][word] | walk->phase[2][word];
        any |= mine | walk->phase[BL_PREFIX_POOL][word];
        if (early)
            own += (uint32_t)__builtin_popcountll(word ? mine : mine & ~1ull);
    }
    return any && !(early && own == 1);
}

/* End the walk: every remaining rank ends at depth. */
static void bl_prefix_finish(bl_prefix_walk *walk, uint32_t depth)
{
    for (uint32_t word = 0; word < walk->prefix->words; word++) {
        uint64_t here = 0;
        for (uint32_t phase = 0; phase < BL_PREFIX_PHASES; phase++) {
            here |= walk->phase[phase][word];
            for (uint64_t left = here; left; left &= left - 1)
                walk->end[word * 64 + (uint32_t)__builtin_ctzll(left)][phase] = depth;
        }
    }
}

/* Walk in three stages, each some blocks behind the previous one: compute the slot of a block; read
 * the block's number there; compare the block and read which ranks hold it. Returns the number of
 * blocks visited while some rank remained. */
static inline uint32_t bl_prefix_follow(bl_prefix_walk *walk, const uint64_t *locals,
                                        uint32_t count, uint32_t words, int early)
{
    const bl_prefix *prefix = walk->prefix;
    const bl_prefix_table *table = &prefix->block_table;
    uint32_t tags[BL_PREFIX_RING], found[BL_PREFIX_RING], parent = 0;
    uint64_t path = bl_prefix_block_at(prefix, 0)->path;
    for (uint64_t i = 0; i < (uint64_t)count + 2 * BL_PREFIX_AHEAD; i++) {
        if (i < count) {
            path = bl_prefix_path(prefix, path, locals[i]);
            tags[i % BL_PREFIX_RING] = bl_prefix_block_tag(path);
            bl_prefetch(bl_prefix_slot(table, tags[i % BL_PREFIX_RING]));
        }
        if (i >= BL_PREFIX_AHEAD && i - BL_PREFIX_AHEAD < count) {
            uint32_t place = (i - BL_PREFIX_AHEAD) % BL_PREFIX_RING;
            uint64_t at = tags[place];
            found[place] = bl_prefix_next(table, tags[place], &at);
            const bl_prefix_block *block = bl_prefix_block_at(prefix, found[place]);
            bl_prefetch(block);
            bl_prefetch((const uint8_t *)block + prefix->blocks.stride - 1);
        }
        if (i < 2 * BL_PREFIX_AHEAD)
            continue;
        uint32_t depth = (uint32_t)(i - 2 * BL_PREFIX_AHEAD);
        uint32_t number = found[depth % BL_PREFIX_RING];
        const bl_prefix_block *block = bl_prefix_block_at(prefix, number);
        if (number && (block->parent != parent || block->local != locals[depth]))
            number = bl_prefix_child(prefix, parent, locals[depth]);    /* the tag of another
                                                                         * block */
        if (!number)
            return depth;
        if (!bl_prefix_step(walk, bl_prefix_block_at(prefix, number)->held, words, depth, early))
            return depth + 1;
        parent = number;
    }
    return count;
}

int bl_prefix_find(bl_prefix *prefix, const uint64_t *locals, uint32_t count, int early_exit,
                   bl_prefix_match *matches, uint32_t *shared)
{
    bl_prefix_walk walk;
    walk.prefix = prefix;
    int match_count = 0;
    pthread_rwlock_rdlock(&prefix->lock);
    memset(walk.phase, 0, sizeof walk.phase);
    memcpy(walk.phase[0], prefix->active, prefix->words * sizeof *prefix->active);
    /* Most trees have at most 64 ranks, and most calls no early exit: the constants let the
     * compiler specialize this path. */
    uint32_t depth = prefix->words == 1 && !early_exit
                         ? bl_prefix_follow(&walk, locals, count, 1, 0)
                         : bl_prefix_follow(&walk, locals, count, prefix->words, early_exit);
    bl_prefix_finish(&walk, depth);
    *shared = prefix->active[0] & 1u << BL_PREFIX_SHARED ? walk.end[BL_PREFIX_SHARED][0] : 0;
    for (uint32_t word = 0; word < prefix->words; word++) {
        uint64_t left = prefix->active[word] & ~(word ? 0 : 1ull << BL_PREFIX_SHARED);
        for (; left; left &= left - 1) {
            uint32_t rank = word * 64 + (uint32_t)__builtin_ctzll(left);
            const uint32_t *end = walk.end[rank];
            if (end[BL_PREFIX_DISK])
                matches[match_count++] =
                    (bl_prefix_match){rank, end[0], end[1], end[2], end[BL_PREFIX_POOL]};
        }
    }
    pthread_rwlock_unlock(&prefix->lock);
    return match_count;
}

/* ---- Dump. */

/* Return a name that a rank has for a block; 0 if none. */
static uint64_t bl_prefix_spoken(const bl_prefix *prefix, uint32_t block, uint32_t rank)
{
    uint32_t number = bl_prefix_block_at(prefix, block)->first_name;
    while (number) {
        const bl_prefix_name *name = bl_prefix_name_at(prefix, number);
        if (bl_prefix_tiers(name->held, prefix->words, rank))
            return name->hash;
        number = name->next;
    }
    return 0;
}

int64_t bl_prefix_dump(bl_prefix *prefix, uint32_t rank, bl_prefix_row *rows, uint64_t room)
{
    uint64_t count = 0;
    pthread_rwlock_rdlock(&prefix->lock);
    for (uint32_t number = 1; rank <= prefix->rank_max && number < prefix->names.top; number++) {
        const bl_prefix_name *name = bl_prefix_name_at(prefix, number);
        uint32_t tiers = name->block ? bl_prefix_tiers(name->held, prefix->words, rank) : 0;
        for (uint32_t tier = 0; tiers >> tier; tier++) {
            if (!(tiers >> tier & 1) || count++ >= room)
                continue;
            const bl_prefix_block *block = bl_prefix_block_at(prefix, name->block);
            rows[count - 1] = (bl_prefix_row){
                .name = name->hash,
                .parent = bl_prefix_spoken(prefix, block->parent, rank),
                .local = block->local,
                .block = name->block,
                .before = block->parent,
                .depth = block->depth,
                .tier = tier,
            };
        }
    }
    pthread_rwlock_unlock(&prefix->lock);
    return (int64_t)count;
}

void bl_prefix_paths(const bl_prefix *prefix, const uint64_t *locals, uint32_t count,
                     uint64_t *paths)
{
    uint64_t path = bl_prefix_block_at(prefix, 0)->path;
    for (uint32_t i = 0; i < count; i++)
        paths[i] = path = bl_prefix_path(prefix, path, locals[i]);
}
