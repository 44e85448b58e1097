/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Implements the token bucket (api/iosched.h). Its counters only grow, so a ticket is a value of a
 * counter and waiting is a comparison. The counters wrap, so they are compared by their distance.
 */
#include "api/iosched.h"

#include <errno.h>

#include "base/host_atomic.h"

static const uint64_t BL_SECOND_NS = 1000000000;
static const uint64_t BL_HOUR_NS = 3600 * 1000000000ull;

int bl_tokens_init(bl_tokens *bucket, uint64_t rate, uint64_t limit, uint64_t threshold,
                   int capped, uint64_t now_ns)
{
    if (rate == 0 || rate > UINT64_MAX / 2 / 3600 || limit == 0)
        return -EINVAL;
    threshold = threshold < 1 ? 1 : threshold > limit ? limit : threshold;
    *bucket = (bl_tokens){.ceil = limit,
                          .replenished_ns = now_ns - 24 * BL_HOUR_NS, /* so it is full at once */
                          .rate = rate,
                          .limit = limit,
                          .threshold = threshold,
                          .capped = capped != 0};
    return 0;
}

uint64_t bl_tokens_grab(bl_tokens *bucket, uint64_t tokens)
{
    return bl_host_add(&bucket->tail, tokens);
}

uint64_t bl_tokens_lacks(const bl_tokens *bucket, uint64_t ticket)
{
    int64_t ahead = bl_host_ahead(ticket, bl_host_load(&bucket->head));
    return ahead > 0 ? (uint64_t)ahead : 0;
}

void bl_tokens_replenish(bl_tokens *bucket, uint64_t now_ns)
{
    uint64_t last = bl_host_load(&bucket->replenished_ns);
    int64_t elapsed = bl_host_ahead(now_ns, last);
    if (elapsed <= 0)
        return;
    uint64_t ns = (uint64_t)elapsed > BL_HOUR_NS ? BL_HOUR_NS : (uint64_t)elapsed;
    uint64_t extra = (uint64_t)(((unsigned __int128)ns * bucket->rate + BL_SECOND_NS / 2) /
                                BL_SECOND_NS);
    /* The process that wins the exchange adds the tokens for the elapsed time. If it dies here,
     * those tokens are lost. */
    if (extra < bucket->threshold || !bl_host_swap(&bucket->replenished_ns, last, now_ns))
        return;
    uint64_t most = bucket->capped ? bl_host_load(&bucket->ceil)
                                   : bl_host_load(&bucket->tail) + bl_host_load(&bucket->limit);
    int64_t room = bl_host_ahead(most, bl_host_load(&bucket->head));
    if (room > 0)
        bl_host_add(&bucket->head, extra < (uint64_t)room ? extra : (uint64_t)room);
}

void bl_tokens_refund(bl_tokens *bucket, uint64_t tokens)
{
    bl_tokens_release(bucket, tokens); /* otherwise refunded tokens would count as in use forever */
    bl_host_add(&bucket->head, tokens);
}

void bl_tokens_release(bl_tokens *bucket, uint64_t tokens)
{
    if (bucket->capped)
        bl_host_add(&bucket->ceil, tokens);
}

uint64_t bl_tokens_duration_ns(const bl_tokens *bucket, uint64_t tokens)
{
    uint64_t rate = bl_host_load(&bucket->rate); /* 0: the limit was just lifted */
    unsigned __int128 scaled = (unsigned __int128)tokens * BL_SECOND_NS + rate;
    return rate == 0 ? 0 : (uint64_t)((scaled - 1) / rate);
}
