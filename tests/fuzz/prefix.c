/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Fuzzes the router's tree of blocks with hostile KV events: names that clash, cycles of parents,
 * more blocks than there is room for.
 *
 * Invariants: those of csrc/prefix/prefix_tree.h; a lookup returns the same as a plain walk of the
 * blocks; when all ranks are cleared, the tree is empty.
 */
#include "fuzz.h"

enum { FUZZ_RANKS = 66, FUZZ_COUNT_MAX = 12, FUZZ_LOCALS = 3, FUZZ_CHECKS = 16 };

static bl_prefix *prefix;
static bl_prefix_outcome outcome;

static uint32_t fuzz_rank(void)
{
    static const uint32_t ranks[] = {0, 1, 2, 63, 64, 65, 66, 67};
    return ranks[fuzz_byte() % 8];
}

static uint32_t fuzz_hashes(uint64_t *hashes, uint32_t kinds)
{
    uint32_t count = fuzz_byte() % (FUZZ_COUNT_MAX + 1);
    for (uint32_t i = 0; i < count; i++)
        hashes[i] = fuzz_byte() % kinds;
    return count;
}

static void fuzz_check_names(void)
{
    uint64_t held[FUZZ_RANKS + 1][BL_PREFIX_TIERS] = {{0}};
    uint32_t count = 0;
    for (uint32_t number = 1; number < prefix->names.top; number++) {
        const bl_prefix_name *name = bl_prefix_name_at(prefix, number);
        if (!name->block)
            continue;
        uint32_t holders = 0;
        for (uint32_t rank = 0; rank <= FUZZ_RANKS; rank++)
            for (uint32_t tier = 0; tier < BL_PREFIX_TIERS; tier++) {
                uint32_t bit = (uint32_t)bl_prefix_bit(name->held, prefix->words, rank, tier);
                holders += bit;
                held[rank][tier] += bit;
                fuzz_must(!bit || bl_prefix_name_of(prefix, rank, name->hash) == number,
                          "a name stands for one block of a rank");
            }
        fuzz_must(holders > 0, "a name has a holder");
        count++;
    }
    fuzz_must(count == prefix->names.count, "names are counted");
    fuzz_must(memcmp(held, prefix->held, sizeof held) == 0, "what ranks hold is counted");
}

static void fuzz_check_blocks(void)
{
    uint32_t count = 0, leaves = 0, names = 0, children = 0;
    for (uint32_t number = 1; number < prefix->blocks.top; number++) {
        const bl_prefix_block *block = bl_prefix_block_at(prefix, number);
        if (!block->depth)
            continue;
        uint64_t bits[BL_PREFIX_TIERS * 2] = {0};
        uint32_t own = 0;
        for (uint32_t i = block->first_name; i; i = bl_prefix_name_at(prefix, i)->next, own++)
            for (uint32_t word = 0; word < BL_PREFIX_TIERS * 2; word++)
                bits[word] |= bl_prefix_name_at(prefix, i)->held[word];
        fuzz_must(own == block->name_count, "a block's names are counted");
        fuzz_must(own || block->child_count, "a block has a name or a child");
        fuzz_must(memcmp(bits, block->held, sizeof bits) == 0, "bits are those of the names");
        fuzz_must(bl_prefix_child(prefix, block->parent, block->local) == number,
                  "a block is found");
        fuzz_must(bl_evict_has(prefix->leaves, number) == !block->child_count,
                  "leaves are in the order");
        children += block->child_count;
        leaves += !block->child_count;
        names += own;
        count++;
    }
    children += bl_prefix_block_at(prefix, 0)->child_count;
    fuzz_must(count == prefix->blocks.count && children == count, "blocks are counted");
    int64_t leaf = bl_evict_coldest(prefix->leaves);
    for (; leaf >= 0 && leaves > 0; leaves--)
        leaf = bl_evict_warmer(prefix->leaves, (uint32_t)leaf);
    fuzz_must(leaves == 0 && leaf < 0, "nothing else is in the order");
    fuzz_must(names == prefix->names.count, "each name is a block's");
}

/* Return a rank's runs by following children, tier after tier. */
static bl_prefix_match fuzz_expect(uint32_t rank, const uint64_t *locals, uint32_t count)
{
    uint32_t ends[BL_PREFIX_TIERS + 1], depth = 0, at = bl_prefix_child(prefix, 0, locals[0]);
    for (uint32_t tier = 0; tier <= BL_PREFIX_TIERS; tier++) {
        uint32_t who = tier == BL_PREFIX_TIERS ? BL_PREFIX_SHARED : rank;
        while (depth < count && at &&
               bl_prefix_bit(bl_prefix_block_at(prefix, at)->held, prefix->words, who,
                             tier % BL_PREFIX_TIERS))
            if (++depth < count)
                at = bl_prefix_child(prefix, at, locals[depth]);
        ends[tier] = depth;
    }
    return (bl_prefix_match){rank, ends[0], ends[1], ends[2], ends[3]};
}

static void fuzz_look(void)
{
    uint64_t locals[FUZZ_COUNT_MAX];
    bl_prefix_match matches[FUZZ_RANKS];
    uint32_t shared, count = fuzz_hashes(locals, FUZZ_LOCALS);
    int found = bl_prefix_find(prefix, locals, count, 0, matches, &shared), next = 0;
    if (count == 0) {
        fuzz_must(!found && !shared, "nothing is found of nothing");
        return;
    }
    for (uint32_t rank = 1; rank <= FUZZ_RANKS; rank++) {
        bl_prefix_match wanted = fuzz_expect(rank, locals, count);
        if (wanted.disk)
            fuzz_must(next < found && !memcmp(&matches[next++], &wanted, sizeof wanted),
                      "a rank's runs are found");
    }
    fuzz_must(next == found, "nobody else is found");
    fuzz_must(shared == fuzz_expect(BL_PREFIX_SHARED, locals, count).device,
              "the pool's run is found");
    fuzz_must(bl_prefix_find(prefix, locals, count, 1, matches, &shared) <= found,
              "stopping early finds no more");
}

static void fuzz_event(void)
{
    uint64_t names[FUZZ_COUNT_MAX], locals[FUZZ_COUNT_MAX], parent = fuzz_byte() % 24;
    uint32_t kind = fuzz_byte() % 16, rank = fuzz_rank(), tier = fuzz_byte() % 4;
    uint32_t speaker = fuzz_rank(), count = fuzz_hashes(names, 24);
    for (uint32_t i = 0; i < count; i++)
        locals[i] = fuzz_byte() % FUZZ_LOCALS;
    if (kind < 9)
        bl_prefix_store(prefix, rank, tier, speaker, kind < 4 ? NULL : &parent, names, locals,
                        count, &outcome);
    else if (kind < 10)
        bl_prefix_hold(prefix, rank, tier, speaker, names, count, &outcome);
    else if (kind < 14)
        bl_prefix_remove(prefix, rank, tier, names, count, &outcome);
    else if (kind < 15)
        bl_prefix_clear(prefix, rank, &outcome);
    else
        fuzz_look();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_next = data;
    fuzz_left = size;
    uint32_t block_max = 1 + fuzz_byte() % 40, name_max = 1 + fuzz_byte() % 60;
    fuzz_must(bl_prefix_create(&prefix, FUZZ_RANKS, block_max, name_max) == 0, "a tree is made");
    bl_prefix_row rows[64];
    for (uint32_t step = 0; fuzz_left > 0; step++) {
        fuzz_event();
        if (step % FUZZ_CHECKS == 0 || fuzz_left == 0) {
            fuzz_check_names();
            fuzz_check_blocks();
            bl_prefix_dump(prefix, fuzz_rank(), rows, 64);
        }
    }
    for (uint32_t rank = 0; rank <= FUZZ_RANKS; rank++)
        bl_prefix_clear(prefix, rank, &outcome);
    fuzz_must(!prefix->blocks.count && !prefix->names.count, "nothing is left");
    fuzz_check_blocks();
    bl_prefix_destroy(prefix);
    return 0;
}
