/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The frozen pool format: sizes and offsets as literals, so that a field cannot move unnoticed. A
 * change of format/pool_format.h requires a second edit here, and a new BL_FORMAT_VERSION.
 */
#include <stddef.h>

#include "format/pool_format.h"

#define BL_SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), #type " has another size")
#define BL_FIELD(type, field, at)                                                                  \
    _Static_assert(offsetof(type, field) == (at), #type "." #field " has moved")
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

BL_SIZE(bl_geometry, 112);
BL_FIELD(bl_geometry, device_count, 0);
BL_FIELD(bl_geometry, interleaved, 4);
BL_FIELD(bl_geometry, device_size, 8);
BL_FIELD(bl_geometry, size, 16);
BL_FIELD(bl_geometry, lane_count, 24);
BL_FIELD(bl_geometry, slot_count, 28);
BL_FIELD(bl_geometry, bulk_size, 32);
BL_FIELD(bl_geometry, block_count_max, 36);
BL_FIELD(bl_geometry, session_offset, 40);
BL_FIELD(bl_geometry, lane_offset, 48);
BL_FIELD(bl_geometry, lane_stride, 56);
BL_FIELD(bl_geometry, table_offset, 64);
BL_FIELD(bl_geometry, extent_offset, 72);
BL_FIELD(bl_geometry, data_offset, 80);
BL_FIELD(bl_geometry, stripe_count, 88);
BL_FIELD(bl_geometry, name_offset, 96);
BL_FIELD(bl_geometry, reserved, 104);

BL_SIZE(bl_superblock, 256);
BL_FIELD(bl_superblock, magic, 0);
BL_FIELD(bl_superblock, version, 8);
BL_FIELD(bl_superblock, header_size, 12);
BL_FIELD(bl_superblock, format_hash, 16);
BL_FIELD(bl_superblock, pool_id, 24);
BL_FIELD(bl_superblock, device_index, 40);
BL_FIELD(bl_superblock, coherence, 44);
BL_FIELD(bl_superblock, sparse, 48);
BL_FIELD(bl_superblock, stripe_size, 52);
BL_FIELD(bl_superblock, created_s, 56);
BL_FIELD(bl_superblock, geometry, 64);
BL_FIELD(bl_superblock, reserved, 176);
BL_FIELD(bl_superblock, reserved_tail, 248);
BL_FIELD(bl_superblock, check, 252);

BL_SIZE(bl_epoch_line, 64);
BL_FIELD(bl_epoch_line, epoch, 0);
BL_FIELD(bl_epoch_line, boot_id, 8);
BL_FIELD(bl_epoch_line, nonce, 24);
BL_FIELD(bl_epoch_line, host, 32);
BL_FIELD(bl_epoch_line, state, 36);
BL_FIELD(bl_epoch_line, pid, 40);
BL_FIELD(bl_epoch_line, reserved, 44);
BL_FIELD(bl_epoch_line, reserved_tail, 56);
BL_FIELD(bl_epoch_line, check, 60);

BL_SIZE(bl_candidate_line, 64);
BL_FIELD(bl_candidate_line, epoch, 0);
BL_FIELD(bl_candidate_line, ballot, 8);
BL_FIELD(bl_candidate_line, accepted, 16);
BL_FIELD(bl_candidate_line, nonce, 24);
BL_FIELD(bl_candidate_line, boot_id, 32);
BL_FIELD(bl_candidate_line, host, 48);
BL_FIELD(bl_candidate_line, reserved, 52);
BL_FIELD(bl_candidate_line, reserved_tail, 56);
BL_FIELD(bl_candidate_line, check, 60);

BL_SIZE(bl_heartbeat_line, 64);
BL_FIELD(bl_heartbeat_line, count, 0);
BL_FIELD(bl_heartbeat_line, nonce, 8);
BL_FIELD(bl_heartbeat_line, reserved, 16);
BL_FIELD(bl_heartbeat_line, reserved_tail, 56);
BL_FIELD(bl_heartbeat_line, check, 60);

BL_SIZE(bl_lobby_request, 64);
BL_FIELD(bl_lobby_request, sequence, 0);
BL_FIELD(bl_lobby_request, operation, 4);
BL_FIELD(bl_lobby_request, nonce, 8);
BL_FIELD(bl_lobby_request, old_nonce, 16);
BL_FIELD(bl_lobby_request, boot_id, 24);
BL_FIELD(bl_lobby_request, host, 40);
BL_FIELD(bl_lobby_request, pid, 44);
BL_FIELD(bl_lobby_request, epoch, 48);
BL_FIELD(bl_lobby_request, check, 56);
BL_FIELD(bl_lobby_request, sequence_end, 60);

BL_SIZE(bl_lobby_reply, 64);
BL_FIELD(bl_lobby_reply, sequence, 0);
BL_FIELD(bl_lobby_reply, status, 4);
BL_FIELD(bl_lobby_reply, nonce, 8);
BL_FIELD(bl_lobby_reply, epoch, 16);
BL_FIELD(bl_lobby_reply, boot_id, 24);
BL_FIELD(bl_lobby_reply, lane, 40);
BL_FIELD(bl_lobby_reply, live_count, 44);
BL_FIELD(bl_lobby_reply, reserved, 48);
BL_FIELD(bl_lobby_reply, check, 56);
BL_FIELD(bl_lobby_reply, sequence_end, 60);

BL_SIZE(bl_doorbell, 64);
BL_FIELD(bl_doorbell, ring, 0);

BL_SIZE(bl_session_line, 64);
BL_FIELD(bl_session_line, nonce, 0);
BL_FIELD(bl_session_line, boot_id, 8);
BL_FIELD(bl_session_line, host, 24);
BL_FIELD(bl_session_line, state, 28);
BL_FIELD(bl_session_line, epoch, 32);
BL_FIELD(bl_session_line, reserved, 40);
BL_FIELD(bl_session_line, check, 60);

BL_SIZE(bl_request, 64);
BL_FIELD(bl_request, sequence, 0);
BL_FIELD(bl_request, method, 4);
BL_FIELD(bl_request, flags, 6);
BL_FIELD(bl_request, size, 7);
BL_FIELD(bl_request, epoch, 8);
BL_FIELD(bl_request, reserved, 12);
BL_FIELD(bl_request, payload, 16);
BL_FIELD(bl_request, check, 56);
BL_FIELD(bl_request, sequence_end, 60);

BL_SIZE(bl_reply, 64);
BL_FIELD(bl_reply, sequence, 0);
BL_FIELD(bl_reply, reserved, 4);
BL_FIELD(bl_reply, flags, 6);
BL_FIELD(bl_reply, size, 7);
BL_FIELD(bl_reply, epoch, 8);
BL_FIELD(bl_reply, status, 12);
BL_FIELD(bl_reply, payload, 16);
BL_FIELD(bl_reply, check, 56);
BL_FIELD(bl_reply, sequence_end, 60);

BL_SIZE(bl_bulk, 8);
BL_FIELD(bl_bulk, size, 0);
BL_FIELD(bl_bulk, check, 4);

BL_SIZE(bl_block_request, 24);
BL_FIELD(bl_block_request, fingerprint, 0);
BL_FIELD(bl_block_request, length, 8);
BL_FIELD(bl_block_request, chunk_size, 12);
BL_FIELD(bl_block_request, count, 16);
BL_FIELD(bl_block_request, flags, 20);

BL_SIZE(bl_task_request, 24);
BL_FIELD(bl_task_request, queue, 0);
BL_FIELD(bl_task_request, generation, 8);
BL_FIELD(bl_task_request, block, 16);
BL_FIELD(bl_task_request, visible_ms, 20);

BL_SIZE(bl_task, 40);
BL_FIELD(bl_task, key, 0);
BL_FIELD(bl_task, generation, 16);
BL_FIELD(bl_task, block, 24);
BL_FIELD(bl_task, length, 28);
BL_FIELD(bl_task, deliveries, 32);
BL_FIELD(bl_task, reserved, 36);

BL_SIZE(bl_task_counts, 8);
BL_FIELD(bl_task_counts, waiting, 0);
BL_FIELD(bl_task_counts, claimed, 4);

BL_SIZE(bl_lower_request, 16);
BL_FIELD(bl_lower_request, token, 0);
BL_FIELD(bl_lower_request, count, 8);
BL_FIELD(bl_lower_request, kind, 12);
BL_FIELD(bl_lower_request, tier, 13);
BL_FIELD(bl_lower_request, reserved, 14);

BL_SIZE(bl_lower_record, 56);
BL_FIELD(bl_lower_record, key, 0);
BL_FIELD(bl_lower_record, fingerprint, 16);
BL_FIELD(bl_lower_record, generation, 24);
BL_FIELD(bl_lower_record, offset, 32);
BL_FIELD(bl_lower_record, length, 40);
BL_FIELD(bl_lower_record, chunk_size, 44);
BL_FIELD(bl_lower_record, block, 48);
BL_FIELD(bl_lower_record, tiers, 52);
BL_FIELD(bl_lower_record, stale, 53);
BL_FIELD(bl_lower_record, reserved, 54);

BL_SIZE(bl_lower_note, 32);
BL_FIELD(bl_lower_note, key, 0);
BL_FIELD(bl_lower_note, generation, 16);
BL_FIELD(bl_lower_note, block, 24);
BL_FIELD(bl_lower_note, stored, 28);
BL_FIELD(bl_lower_note, lost, 29);
BL_FIELD(bl_lower_note, ended, 30);
BL_FIELD(bl_lower_note, removal, 31);

BL_SIZE(bl_retire_request, 8);
BL_FIELD(bl_retire_request, offset, 0);

BL_SIZE(bl_block_reply, 8);
BL_FIELD(bl_block_reply, count, 0);
BL_FIELD(bl_block_reply, state, 4);

BL_SIZE(bl_block_record, 32);
BL_FIELD(bl_block_record, offset, 0);
BL_FIELD(bl_block_record, generation, 8);
BL_FIELD(bl_block_record, block, 16);
BL_FIELD(bl_block_record, length, 20);
BL_FIELD(bl_block_record, state, 24);
BL_FIELD(bl_block_record, status, 28);

BL_SIZE(bl_commit, 32);
BL_FIELD(bl_commit, key, 0);
BL_FIELD(bl_commit, generation, 16);
BL_FIELD(bl_commit, block, 24);
BL_FIELD(bl_commit, checksums_crc, 28);

BL_SIZE(bl_name, 48);
BL_FIELD(bl_name, block_hash, 0);
BL_FIELD(bl_name, parent_hash, 8);
BL_FIELD(bl_name, tokens_hash, 16);
BL_FIELD(bl_name, space, 24);
BL_FIELD(bl_name, block_tokens, 32);
BL_FIELD(bl_name, rank, 36);
BL_FIELD(bl_name, rank_count, 38);
BL_FIELD(bl_name, flags, 40);
BL_FIELD(bl_name, reserved, 44);

BL_SIZE(bl_named_commit, 80);
BL_FIELD(bl_named_commit, commit, 0);
BL_FIELD(bl_named_commit, name, 32);

BL_SIZE(bl_entry, 64);
BL_FIELD(bl_entry, key, 0);
BL_FIELD(bl_entry, generation, 16);
BL_FIELD(bl_entry, offset, 24);
BL_FIELD(bl_entry, fingerprint, 32);
BL_FIELD(bl_entry, length, 40);
BL_FIELD(bl_entry, chunk_size, 44);
BL_FIELD(bl_entry, checksums_crc, 48);
BL_FIELD(bl_entry, state, 52);
BL_FIELD(bl_entry, flags, 56);
BL_FIELD(bl_entry, check, 60);

BL_SIZE(bl_name_line, 64);
BL_FIELD(bl_name_line, generation, 0);
BL_FIELD(bl_name_line, name, 8);
BL_FIELD(bl_name_line, reserved, 56);
BL_FIELD(bl_name_line, check, 60);

BL_SIZE(bl_extent_line, 64);
BL_FIELD(bl_extent_line, epoch, 0);
BL_FIELD(bl_extent_line, generation, 8);
BL_FIELD(bl_extent_line, first_stripe, 16);
BL_FIELD(bl_extent_line, stripe_count, 20);
BL_FIELD(bl_extent_line, block_size, 24);
BL_FIELD(bl_extent_line, block_count, 28);
BL_FIELD(bl_extent_line, state, 32);
BL_FIELD(bl_extent_line, reserved, 36);
BL_FIELD(bl_extent_line, check, 60);
