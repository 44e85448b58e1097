/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * One line, one message (D3): building a line that proves itself, and believing one. Pure; works on
 * private copies. The check is keyed with the session's nonce and its server's epoch: what a former
 * session of a lane left behind, what one that was taken for dead still writes, and what an undead
 * server would answer in its successor's place, is not a message.
 */
#ifndef BL_MESSAGE_H
#define BL_MESSAGE_H

#include "format/line.h"

/* Give a line its sequence, at both ends, and its check. Both are put into words first: an 8-byte
 * load of what was just stored in two pieces would wait for the pieces to reach the cache. */
static inline void bl_message_seal(void *line, uint32_t sequence, uint64_t key)
{
    uint64_t word[8];
    memcpy(word, line, sizeof word);
    word[0] = (word[0] & 0xffffffff00000000u) | sequence;
    word[7] = (uint64_t)sequence << 32;
    word[7] |= bl_line_hash(word, key);
    memcpy(line, word, sizeof word);
}

/* What the lines between a session and a server are keyed with. */
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
 * place's own number, so that a line copied to another place does not pass. */
#define bl_table_seal(line, key) ((line)->check = bl_table_check(line, key))
#define bl_table_whole(line, key) ((line)->check == bl_table_check(line, key))

#endif
