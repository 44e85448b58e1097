/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Checks the bytes of a block: the entry's CRC covers the checksums, and the checksums cover the
 * payload. See check/line.h.
 */
#include "check/line.h"
#include "format/payload.h"

/* Return 1 if the checksums in the pool have the CRC of the entry. The checksum of a single chunk
 * is not stored. */
static int bl_check_checksums(const bl_check *check, const bl_entry *entry, uint32_t count)
{
    const bl_memory *memory = &check->pool->memory;
    uint64_t offset = bl_checksums_offset(entry->offset, entry->length);
    uint32_t sum = 0;
    bl_refetch(memory, offset, (uint64_t)count * sizeof sum);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t stored;
        bl_fetch(memory, offset + i * sizeof stored, &stored, sizeof stored);
        sum = bl_crc32c(sum, &stored, sizeof stored);
    }
    return sum == entry->checksums_crc;
}

uint32_t bl_check_bytes(bl_check *check, const bl_entry *entry)
{
    const bl_memory *memory = &check->pool->memory;
    uint32_t count = (uint32_t)(((uint64_t)entry->length + entry->chunk_size - 1) /
                                entry->chunk_size);
    if (count > 1 && !bl_check_checksums(check, entry, count))
        return BL_FINDING_CHECKSUMS_DAMAGED;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t done = (uint64_t)i * entry->chunk_size;
        uint64_t rest = entry->length - done;
        uint32_t size = (uint32_t)(rest < entry->chunk_size ? rest : entry->chunk_size);
        uint32_t wanted = entry->checksums_crc;
        bl_throttle_pay(&check->throttle, entry->offset + done, size);
        bl_refetch(memory, entry->offset + done, size);
        bl_fetch(memory, entry->offset + done, check->chunk, size);
        if (count > 1)
            bl_fetch(memory, bl_checksums_offset(entry->offset, entry->length) + i * sizeof wanted,
                     &wanted, sizeof wanted);
        if (bl_crc32c(0, check->chunk, size) != wanted)
            return BL_FINDING_PAYLOAD_DAMAGED;
    }
    return 0;
}
