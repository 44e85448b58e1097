/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Messages of one line (D3): sealing a line with its check, and verifying it, on private copies.
 * The check is keyed with the session's nonce and its server's epoch. So three kinds of lines are
 * rejected: those of a former session of the lane, those of a session that is still writing
 * although it was declared dead, and those of a deposed server that is still writing.
 */
#ifndef BL_MESSAGE_H
#define BL_MESSAGE_H

#include "format/line.h"

/* Set the line's sequence, at both ends, and its check. Both are assembled into 8-byte words first:
 * a load of 8 bytes after two smaller stores cannot use store forwarding and waits until both reach
 * the cache. */
static inline void bl_message_seal(void *line, uint32_t sequence, uint64_t key)
{
    uint64_t word[8];
    memcpy(word, line, sizeof word);
    word[0] = (word[0] & 0xffffffff00000000u) | sequence;
    word[7] = (uint64_t)sequence << 32;
    word[7] |= bl_line_hash(word, key);
    memcpy(line, word, sizeof word);
}

/* Return the key of the lines between a session and a server. */
static inline uint64_t bl_message_key(uint64_t nonce, uint64_t epoch)
{
    return nonce + epoch * 0xd6e8feb86659fd93u;
}

static inline int bl_request_whole(const bl_request *request, uint64_t key)
{
    return request->sequence == request->sequence_end &&
           request->check == bl_message_check(request, key);
}

static inline int bl_reply_whole(const bl_reply *reply, uint64_t key)
{
    return reply->sequence == reply->sequence_end &&
           reply->check == bl_message_check(reply, key);
}

/* Lines that end in their check: epochs, heartbeats, sessions, entries, extents. The key is the
 * number of the line's place, so that a line copied to another place is rejected. */
#define bl_table_seal(line, key) ((line)->check = bl_table_check(line, key))
#define bl_table_whole(line, key) ((line)->check == bl_table_check(line, key))

#endif
