/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The loads of workers, and the cost of a request on each of them (api/routing.h). This runs for
 * every worker and request, so a router of many workers spends most of its time here. Sums have the
 * same order as the formulas in Python, because tests compare the results bit by bit.
 */
#include "api/routing.h"

#include <math.h>

__extension__ typedef __int128 bl_wide;         /* products of two figures cannot overflow */

static inline int64_t bl_greater(int64_t a, int64_t b) { return b > a ? b : a; }
static inline double bl_longer(double a, double b) { return b > a ? b : a; }

int64_t bl_prefills_tokens(const bl_prefills *prefills, double now)
{
    if (!prefills->count)
        return 0;
    if (!prefills->oldest_predicted)
        return prefills->tokens;
    double tokens = (double)prefills->oldest_tokens, done = tokens;
    if (prefills->oldest_s > 0)
        done = tokens * bl_longer(now - prefills->oldest_since, 0.0) / prefills->oldest_s;
    if (prefills->unpredicted && tokens < done)
        done = tokens;
    return (int64_t)rint(bl_longer((double)prefills->tokens - done, 0.0));
}

double bl_prefills_seconds(const bl_prefills *prefills, double now)
{
    if (!prefills->count)
        return 0.0;
    double oldest = prefills->oldest_predicted ? prefills->oldest_s : 0.0;
    return prefills->seconds - oldest + fabs(prefills->oldest_since + oldest - now);
}

void bl_loads_refresh(bl_load *const *loads, bl_prefills *const *prefills, uint32_t count,
                      double now)
{
    for (uint32_t i = 0; i < count; i++) {
        loads[i]->active_prefill_tokens = bl_prefills_tokens(prefills[i], now);
        loads[i]->prefill_s = bl_prefills_seconds(prefills[i], now);
    }
}

/* Return the greater of two counts: the worker's includes the blocks of answers, the router's those
 * of waiting prompts. */
static inline int64_t bl_held_blocks(const bl_load *load)
{
    return bl_greater(load->active_decode_blocks, load->kv_active_blocks);
}

static inline double bl_step_s(const bl_costs *costs, double batch, double context)
{
    return (costs->e + costs->f * batch + costs->g * context + costs->h) / 1e3;
}

/* Return the seconds to compute new tokens after cached ones on an otherwise idle worker. */
static inline double bl_alone_s(const bl_costs *costs, int64_t new, int64_t cached, double steps)
{
    double n = (double)new, prefill_ms = 0.0;
    if (new > 0)
        prefill_ms = costs->a + costs->b * n + costs->c * n * ((double)cached + n / 2);
    return (prefill_ms + steps * costs->h) / 1e3;
}

void bl_estimates(const bl_costs *costs, int64_t input_tokens, const bl_candidate *rows,
                  const int64_t *fetched, uint32_t count, bl_estimate *estimates)
{
    int64_t size = costs->block_tokens, cached_max = bl_greater(input_tokens - 1, 0);
    for (uint32_t i = 0; i < count; i++) {
        const bl_candidate *row = &rows[i];
        int64_t more = fetched ? fetched[i] : 0, own = row->host + row->disk;
        int64_t shared = row->shared + more;
        bl_wide found = (bl_wide)(row->device + own + shared) * size;
        int64_t cached = found < cached_max ? (int64_t)found : cached_max;
        int64_t new = input_tokens - cached;
        double steps = (double)(new / costs->step_tokens + (new % costs->step_tokens > 0));
        double held = (double)((bl_wide)bl_held_blocks(&row->load) * size);
        double batch = (double)row->load.active_requests;
        /* On average, a request arrives in the middle of a step. */
        double step_left_s = batch != 0 ? bl_step_s(costs, batch, held) / 2 : 0.0;
        double decode_s = steps * (costs->f * batch + costs->g * held) / 1e3;
        estimates[i] = (bl_estimate){
            .queue_s = row->load.prefill_s + step_left_s,
            .prefill_s = bl_alone_s(costs, new, cached, steps) + decode_s,
            .transfer_s = (double)costs->block_bytes * ((double)own / costs->host_bytes_per_s +
                                                        (double)shared / costs->bytes_per_s),
            .between_tokens_s = bl_step_s(costs, batch + 1, held),
        };
    }
}

/* Return the wait for excess blocks of a worker, as a multiple of the duration of an answer, in
 * which all blocks become free once. No block becomes free before the first of the running requests
 * ends. */
static inline double bl_rounds(int64_t excess, int64_t blocks, int64_t held, int64_t requests)
{
    if (excess <= 0 || !requests)
        return 0.0;
    bl_wide fit = (bl_wide)blocks * requests / bl_greater(held, 1);
    int64_t together = fit < requests ? (int64_t)fit : requests;
    return bl_longer((double)excess / (double)blocks, 1.0 / (double)bl_greater(together, 1));
}

/* Return the standard deviation of the number of blocks that a later request needs beyond the free
 * ones.
 *
 * One part is the typical deviation of its prompt. The other is the change of held while requests
 * come and go, measured over the time of each request that has ended, plus one prior: if requests
 * with m = held / requests blocks each run for T seconds on average, with exponentially distributed
 * sizes and times, then after t seconds the change has the variance requests * (1 - exp(-2t / T)) *
 * 2m^2. Over the time of one request, the mean of 1 - exp(-2t / T) is 2/3. So 25 requests with 400
 * blocks change by 92. */
static inline double bl_spread(const bl_pressure *pressure, int64_t held, int64_t requests)
{
    double square = (double)((bl_wide)held * held * 4);
    double derived = square / 3 / (double)bl_greater(requests, 1);
    return sqrt(pressure->typical_square +
                (pressure->change_sum + derived) / (double)pressure->ended);
}

/* Return the expected number of blocks that a later request will lack if this many are free now.
 * The need is assumed to have a Laplace distribution with the standard deviation spread: its tails
 * are heavier than those of a normal distribution, because requests arrive in bursts. */
static inline double bl_missing(double free, double spread)
{
    double scale = spread / sqrt(2.0);
    double beyond = scale / 2 * exp(-fabs(free) / scale);
    return free > 0 ? beyond : beyond - free;
}

void bl_least_costs(const bl_pressure *pressure, const bl_candidate *rows,
                    const bl_estimate *estimates, uint32_t count, double *costs)
{
    /* Blocks that other requests hold are taken for the time in which it holds them alone. */
    double *taken = costs, fewest = 0.0, of_all = 0.0;
    int64_t active = 0;
    for (uint32_t i = 0; i < count; i++) {
        taken[i] = (double)(rows[i].new_blocks + pressure->tail) + rows[i].held_alone;
        fewest = !i || taken[i] < fewest ? taken[i] : fewest;
        of_all += taken[i];
        active += rows[i].load.active_requests;
    }
    /* By Little's law as many requests come while this one runs as are active now, with it. */
    double followers = (double)active / (double)count + 1;
    /* The share of followers that may not go elsewhere. */
    double bound = fewest != 0 ? 1 - fewest * (double)count / of_all : 1.0;
    for (uint32_t i = 0; i < count; i++) {
        const bl_load *load = &rows[i].load;
        const bl_estimate *estimate = &estimates[i];
        int64_t requests = load->active_requests, held = bl_held_blocks(load);
        int64_t blocks = load->kv_total_blocks ? load->kv_total_blocks : pressure->device_blocks;
        int64_t free = blocks - held, excess = rows[i].new_blocks + pressure->tail - free;
        double blocked_s = pressure->answer_s * bl_rounds(excess, blocks, held, requests);
        double ttft_s = bl_longer(estimate->queue_s, estimate->transfer_s + blocked_s) +
                        estimate->prefill_s;
        double spread = bl_spread(pressure, held, requests);
        double after = bl_missing((double)free - taken[i], spread);
        double by_bound = after - bl_missing((double)free, spread);
        double by_free = after - bl_missing((double)free - fewest, spread);
        double missing = bound * by_bound + (1 - bound) * by_free;
        double others_s = followers * pressure->answer_s * missing / (double)blocks;
        costs[i] = ttft_s + pressure->reuse * estimate->transfer_s + others_s;
    }
}
