/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Messages of one line (D3): sealing a line with its check, and checking one. All of it works on
 * private copies. The check is keyed with the session's nonce and its server's epoch, so three
 * kinds of lines are rejected: lines of a former session of the lane, lines that a session
 * considered dead still writes, and lines that a deposed server still writes.
 */
#ifndef BL_MESSAGE_H
#define BL_MESSAGE_H

#include "format/line.h"

/* Give a line its sequence, at both ends, and its check. Both are put into words first: an 8-byte
 * load after two smaller stores cannot be forwarded and waits until both reach the cache. */
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
