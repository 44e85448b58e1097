/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The quota of a session, which limits its part of what all share: calls, by a token bucket (here),
 * and grants, pins and bytes, which the block index counts (index/state.h). What exceeds a quota
 * is refused at once, never queued.
 *
 * Calls that give something back always run, on credit: a rejection would delay the other sessions.
 * Credit ends at one bucket, so that such calls cannot be used to get around the quota.
 */
#include "format/pool_format.h"
#ifndef BL_QUOTA_H
#define BL_QUOTA_H


/* Tokens are counted in billionths: a nanosecond adds calls_per_s of them. A bucket holds the
 * tokens of one second. */
#define BL_TOKEN INT64_C(1000000000)

typedef struct bl_allowance {
    int64_t tokens;             /* may fall to one bucket below zero */
    uint64_t filled_ns;
} bl_allowance;

static inline void bl_allowance_fill(bl_allowance *allowance, uint32_t calls_per_s,
                                     uint64_t now_ns)
{
    int64_t most = calls_per_s * BL_TOKEN;
    __int128 tokens = (__int128)(now_ns - allowance->filled_ns) * calls_per_s + allowance->tokens;
    allowance->tokens = tokens < most ? (int64_t)tokens : most;
    allowance->filled_ns = now_ns;
}

static inline int bl_call_gives(uint32_t method)
{
    return method == BL_METHOD_COMMIT || method == BL_METHOD_ABORT ||
           method == BL_METHOD_RELEASE || method == BL_METHOD_LOWER_TELL;
}

/* Take the token of one call. Returns 1, or 0 if the call must be refused. */
static inline int bl_allowance_take(bl_allowance *allowance, uint32_t calls_per_s,
                                    uint32_t method)
{
    int64_t least = bl_call_gives(method) ? -(int64_t)calls_per_s * BL_TOKEN : 0;
    if (allowance->tokens - BL_TOKEN < least)
        return 0;
    allowance->tokens -= BL_TOKEN;
    return 1;
}

#endif
