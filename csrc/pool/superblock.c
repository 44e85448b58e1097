/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The layout of a pool, and the validation of superblocks, as arithmetic on private copies. A
 * superblock is foreign input, so its geometry is recomputed from the few numbers that its creator
 * chose, and compared. pool/pool.c reads and writes devices.
 */
#include <errno.h>
#include <string.h>

#include "api/coherence.h"
#include "api/pool.h"

/* What the constants of format/pool_format.h rely on. */
#define BL_LIMIT(condition) _Static_assert(condition, #condition)

BL_LIMIT(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
BL_LIMIT(BL_STRIPE_SIZE == 1 << BL_STRIPE_SHIFT);
BL_LIMIT(BL_STRIPE_SIZE % BL_PAGE_SIZE == 0);
BL_LIMIT(BL_PAGE_SIZE % BL_LINE_SIZE == 0);
BL_LIMIT(BL_POLL_STRIDE % BL_LINE_SIZE == 0 && BL_POLL_STRIDE >= 2 * BL_LINE_SIZE);
BL_LIMIT(BL_CHUNK_SIZE % BL_LINE_SIZE == 0);
BL_LIMIT(BL_SERVER_STRIDE == 2 * BL_POLL_STRIDE); /* epoch, heartbeat */
BL_LIMIT(2 * BL_LINE_SIZE <= BL_POLL_STRIDE); /* a line and its second copy */
BL_LIMIT(BL_HALF_COUNT * BL_SERVER_STRIDE <= BL_CANDIDATE_OFFSET);
BL_LIMIT(BL_CANDIDATE_OFFSET + BL_HOST_COUNT * BL_POLL_STRIDE <= BL_LOBBY_OFFSET);
BL_LIMIT((2 + BL_HALF_COUNT) * BL_POLL_STRIDE <= BL_LOBBY_STRIDE); /* request, replies, doorbell */
BL_LIMIT(BL_LOBBY_END == BL_LOBBY_OFFSET + BL_HOST_COUNT * BL_LOBBY_STRIDE);
BL_LIMIT(BL_LOBBY_END % BL_PAGE_SIZE == 0 && BL_LOBBY_END < BL_STRIPE_SIZE);
BL_LIMIT(sizeof(bl_superblock) <= BL_PAGE_SIZE);
BL_LIMIT(sizeof(bl_superblock) % BL_LINE_SIZE == 0);
BL_LIMIT(sizeof(bl_bulk) <= BL_MESSAGE_INLINE_SIZE);

/* The limits of a configuration. Within these limits the sums of the layout cannot overflow 64
 * bits. */
enum bl_geometry_limit {
    BL_LANE_COUNT_MAX = 4096,
    BL_SLOT_COUNT_MIN = 4,
    BL_SLOT_COUNT_MAX = 1024,
    BL_BULK_SIZE_MAX = 64 << 20
};
static const uint64_t bl_device_size_max = 1ull << 47; /* an address space */
static const char bl_magic[8] = {'B', 'E', 'L', 'U', 'G', 'A', '\r', '\n'};

static uint64_t bl_round_up(uint64_t value, uint64_t unit)
{
    return (value + unit - 1) / unit * unit;
}

static int bl_config_invalid(const bl_pool_config *config)
{
    return config->device_count < 1 || config->device_count > BL_DEVICE_COUNT_MAX ||
           config->interleaved > (BL_PLACEMENT_INTERLEAVED | BL_PLACEMENT_METADATA) ||
           (config->interleaved & BL_PLACEMENT_METADATA && config->device_count < 2) ||
           config->sparse > 1 ||
           config->device_size % BL_STRIPE_SIZE != 0 ||
           config->device_size < 2 * BL_STRIPE_SIZE || config->device_size > bl_device_size_max ||
           config->lane_count < 1 || config->lane_count > BL_LANE_COUNT_MAX ||
           config->slot_count < BL_SLOT_COUNT_MIN || config->slot_count > BL_SLOT_COUNT_MAX ||
           (config->slot_count & (config->slot_count - 1)) != 0 ||
           config->bulk_size < BL_PAGE_SIZE || config->bulk_size > BL_BULK_SIZE_MAX ||
           config->bulk_size % BL_PAGE_SIZE != 0 || config->block_count_max < 1;
}

int bl_geometry_make(const bl_pool_config *config, bl_geometry *out)
{
    if (bl_config_invalid(config))
        return -EINVAL;
    const uint64_t line_pair = BL_HALF_COUNT * BL_LINE_SIZE;
    uint32_t apart = config->interleaved & BL_PLACEMENT_METADATA ? 1 : 0;
    uint64_t stripe_count = (config->device_count - apart) *
                            (config->device_size / BL_STRIPE_SIZE - 1);
    bl_geometry g = {
        .device_count = config->device_count,
        .interleaved = config->interleaved,
        .device_size = config->device_size,
        .lane_count = config->lane_count,
        .slot_count = config->slot_count,
        .bulk_size = config->bulk_size,
        .block_count_max = config->block_count_max,
        .session_offset = BL_LOBBY_END,
    };
    g.lane_offset = bl_round_up(g.session_offset + g.lane_count * line_pair, BL_PAGE_SIZE);
    g.lane_stride = bl_round_up(
        BL_PAGE_SIZE + 3ull * g.slot_count * BL_POLL_STRIDE + 3ull * g.bulk_size, BL_PAGE_SIZE);
    g.table_offset = g.lane_offset + g.lane_count * g.lane_stride;
    uint64_t table_size = bl_round_up(g.block_count_max * line_pair, BL_PAGE_SIZE);
    g.name_offset = g.table_offset + table_size;
    g.extent_offset = g.name_offset + table_size;
    /* The extent table has a pair of lines for each data stripe, and itself takes stripes from the
     * data: d stripes of metadata suffice if extent_offset + (all - d) * line_pair <= d *
     * stripe. */
    uint64_t meta_count = (g.extent_offset + stripe_count * line_pair + BL_STRIPE_SIZE +
                           line_pair - 1) / (BL_STRIPE_SIZE + line_pair);
    if (apart) { /* a metadata device takes nothing from the data; its last stripe is for
                  * verify/verify.c */
        meta_count = (g.extent_offset + stripe_count * line_pair + BL_STRIPE_SIZE - 1) /
                     BL_STRIPE_SIZE + 1;
        stripe_count += meta_count;
    }
    if (meta_count >= stripe_count)
        return -ENOSPC;
    g.size = stripe_count * BL_STRIPE_SIZE;
    g.data_offset = meta_count * BL_STRIPE_SIZE;
    g.stripe_count = stripe_count - meta_count;
    if (g.stripe_count > UINT32_MAX) /* an extent line has 32-bit stripe numbers */
        return -EINVAL;
    *out = g;
    return 0;
}

static uint32_t bl_superblock_check(const bl_superblock *superblock)
{
    return bl_crc32c(0, superblock, offsetof(bl_superblock, check));
}

void bl_superblock_make(const bl_pool_config *config, const bl_geometry *geometry,
                        uint32_t device_index, uint32_t coherence, bl_superblock *out)
{
    bl_superblock superblock = {
        .version = BL_FORMAT_VERSION,
        .header_size = sizeof superblock,
        .format_hash = BL_FORMAT_HASH,
        .device_index = device_index,
        .coherence = coherence,
        .sparse = config->sparse,
        .stripe_size = BL_STRIPE_SIZE,
        .created_s = config->created_s,
        .geometry = *geometry,
    };
    memcpy(superblock.magic, bl_magic, sizeof bl_magic);
    memcpy(superblock.pool_id, config->pool_id, sizeof config->pool_id);
    superblock.check = bl_superblock_check(&superblock);
    *out = superblock;
}

/* Return 1 if the fields of a superblock with a right check and this format contradict each
 * other. */
static int bl_superblock_contradicts(const bl_superblock *superblock)
{
    const bl_geometry *g = &superblock->geometry;
    const bl_pool_config config = {
        .device_size = g->device_size,
        .device_count = g->device_count,
        .interleaved = g->interleaved,
        .lane_count = g->lane_count,
        .slot_count = g->slot_count,
        .bulk_size = g->bulk_size,
        .block_count_max = g->block_count_max,
        .sparse = superblock->sparse,
    };
    bl_geometry derived;
    return superblock->header_size != sizeof *superblock ||
           superblock->stripe_size != BL_STRIPE_SIZE ||
           (superblock->coherence != BL_COHERENCE_HARDWARE &&
            superblock->coherence != BL_COHERENCE_SOFTWARE) ||
           superblock->device_index >= g->device_count ||
           bl_geometry_make(&config, &derived) != 0 || memcmp(&derived, g, sizeof *g) != 0;
}

int bl_superblock_fault(const bl_superblock *superblock)
{
    static const bl_superblock empty;
    if (memcmp(superblock, &empty, sizeof empty) == 0)
        return BL_SUPERBLOCK_EMPTY;
    if (memcmp(superblock->magic, bl_magic, sizeof bl_magic) != 0)
        return BL_SUPERBLOCK_FOREIGN;
    if (superblock->version != BL_FORMAT_VERSION)
        return BL_SUPERBLOCK_VERSION; /* another version may have its check elsewhere */
    if (superblock->check != bl_superblock_check(superblock))
        return BL_SUPERBLOCK_DAMAGED;
    if (superblock->format_hash != BL_FORMAT_HASH)
        return BL_SUPERBLOCK_FORMAT;
    if (bl_superblock_contradicts(superblock))
        return BL_SUPERBLOCK_GEOMETRY;
    return BL_SUPERBLOCK_GOOD;
}
