/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Fuzzes the router's computations (csrc/routing) with hostile requests, reports and calls in any
 * order: prompts that share blocks or repeat them, ends in another order than starts, workers that
 * leave, load figures at their limits, counts of other processes from different moments.
 *
 * Invariants: the recently sent blocks are those of a plain list, here and in the tree; counts of
 * holders are those of a plain table; estimates and costs are finite; nothing is left at the end.
 */
#include "fuzz.h"

#include <math.h>

enum {
    FUZZ_RANKS = 5,
    FUZZ_LOCALS = 3,
    FUZZ_PROMPT_MAX = 10,
    FUZZ_SENT_MAX = 256,
    FUZZ_WORKERS = 4,
    FUZZ_REQUESTS = 24,
    FUZZ_BLOCKS = 32
};

/* ---- Recently sent blocks, and a list of them. A path is its locals in base 4, after a 1. */

static bl_prefix *prefix;
static bl_sent *sent;
static double now_s, ttl_s;
static uint32_t sent_max;

typedef struct fuzz_sent {
    uint64_t path;
    double until;
    uint64_t order;
    uint32_t rank;              /* 0: free */
} fuzz_sent;

static fuzz_sent listed[FUZZ_SENT_MAX];
static uint64_t orders;

static uint32_t fuzz_listed(void)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < FUZZ_SENT_MAX; i++)
        count += listed[i].rank != 0;
    return count;
}

static fuzz_sent *fuzz_find(uint32_t rank, uint64_t path)
{
    for (uint32_t i = 0; i < FUZZ_SENT_MAX; i++)
        if (listed[i].rank == rank && (!rank || listed[i].path == path))
            return &listed[i];
    return NULL;
}

static void fuzz_expire(void)
{
    for (uint32_t i = 0; i < FUZZ_SENT_MAX; i++)
        if (listed[i].rank && listed[i].until <= now_s)
            listed[i].rank = 0;
}

/* Return the entry that is removed first: it expires first; of equal ones that of the lowest rank,
 * which was added first. */
static fuzz_sent *fuzz_first(void)
{
    fuzz_sent *first = NULL;
    for (uint32_t i = 0; i < FUZZ_SENT_MAX; i++) {
        fuzz_sent *one = &listed[i];
        if (one->rank && (!first || one->until < first->until ||
                          (one->until == first->until &&
                           (one->rank < first->rank ||
                            (one->rank == first->rank && one->order < first->order)))))
            first = one;
    }
    return first;
}

static void fuzz_list(uint32_t rank, const uint64_t *locals, uint32_t count)
{
    uint64_t paths[FUZZ_PROMPT_MAX], path = 1;
    if (rank < 1 || rank > FUZZ_RANKS)
        return;
    fuzz_expire();
    count = bl_min(count, sent_max);
    for (uint32_t i = 0; i < count; i++)
        paths[i] = path = path * 4 + locals[i];
    for (uint32_t i = count; i-- > 0;) {
        fuzz_sent *one = fuzz_find(rank, paths[i]);
        if (!one)
            one = fuzz_find(0, 0);
        fuzz_must(one != NULL, "the list has room");
        *one = (fuzz_sent){paths[i], now_s + ttl_s, ++orders, rank};
    }
    if (fuzz_listed() > sent_max)
        while (fuzz_listed() > sent_max * 4 / 5)
            fuzz_first()->rank = 0;
}

static uint32_t fuzz_prompt(uint64_t *locals)
{
    uint32_t count = fuzz_byte() % (FUZZ_PROMPT_MAX + 1);
    for (uint32_t i = 0; i < count; i++)
        locals[i] = fuzz_byte() % FUZZ_LOCALS;
    return count;
}

/* A lookup finds the leading blocks that the list has. */
static void fuzz_look(void)
{
    uint64_t locals[FUZZ_PROMPT_MAX];
    uint32_t shared, count = fuzz_prompt(locals), next = 0;
    bl_prefix_match matches[FUZZ_RANKS];
    bl_sent_expire(sent, now_s);
    fuzz_expire();
    uint32_t found = (uint32_t)bl_prefix_find(prefix, locals, count, 0, matches, &shared);
    for (uint32_t rank = 1; rank <= FUZZ_RANKS; rank++) {
        uint64_t path = 1;
        uint32_t lead = 0;
        while (lead < count && fuzz_find(rank, path = path * 4 + locals[lead]))
            lead++;
        if (lead)
            fuzz_must(next < found && matches[next].rank == rank && matches[next++].device == lead,
                      "a lookup finds what was sent");
    }
    fuzz_must(next == found && !shared, "a lookup finds nothing else");
}

static void fuzz_send(void)
{
    static const double steps[] = {0, 0, 0, 0.25, 1, 3, 7, 1e9};
    uint64_t locals[FUZZ_PROMPT_MAX];
    uint32_t kind = fuzz_byte() % 8, rank = fuzz_byte() % (FUZZ_RANKS + 2);
    if (kind < 5) {
        uint32_t count = fuzz_prompt(locals);
        bl_sent_add(sent, rank, locals, count, now_s);
        fuzz_list(rank, locals, count);
    } else if (kind == 5) {
        now_s += steps[fuzz_byte() % 8];
        bl_sent_expire(sent, now_s);
        fuzz_expire();
    } else if (kind == 6) {
        bl_sent_clear(sent, rank);
        for (uint32_t i = 0; i < FUZZ_SENT_MAX; i++)
            if (listed[i].rank == rank)
                listed[i].rank = 0;
    } else {
        fuzz_look();
    }
    fuzz_must(bl_sent_count(sent) == fuzz_listed(), "entries are counted");
    uint64_t held = 0;
    for (rank = 1; rank <= FUZZ_RANKS; rank++)
        held += bl_prefix_held(prefix, rank, BL_PREFIX_DEVICE);
    fuzz_must(held == fuzz_listed(), "the tree has the entries, and nothing else");
}

/* ---- Blocks of running requests, and a table of them. */

static bl_active *active[FUZZ_WORKERS];

typedef struct fuzz_request {
    uint64_t blocks[FUZZ_PROMPT_MAX];
    uint32_t count, worker, running;
} fuzz_request;

static fuzz_request requests[FUZZ_REQUESTS];
static uint32_t holders[FUZZ_WORKERS][FUZZ_BLOCKS];

/* Return blocks like those of a prompt: parents come before children, in a tree of nine branches.
 * A hostile client can also make hashes that repeat; then only the counts are exact. */
static uint32_t fuzz_blocks(uint64_t *blocks, uint32_t *closed)
{
    uint32_t count = fuzz_byte() % (FUZZ_PROMPT_MAX + 1), first = fuzz_byte() % 8;
    *closed = first != 7;
    for (uint32_t i = 0; i < count; i++)
        blocks[i] = *closed ? (i < 2 ? i : 2 + (first % 3) * FUZZ_PROMPT_MAX + i - 2)
                            : fuzz_byte() % FUZZ_BLOCKS;
    return count;
}

static void fuzz_check_active(uint32_t worker)
{
    uint32_t count = 0;
    for (uint32_t block = 0; block < FUZZ_BLOCKS; block++) {
        count += holders[worker][block] > 0;
        fuzz_must(bl_active_holders(active[worker], block) == holders[worker][block],
                  "holders are counted");
    }
    fuzz_must(bl_active_count(active[worker]) == count, "blocks are counted");
}

static void fuzz_end(fuzz_request *request)
{
    if (!request->running)
        return;
    request->running = 0;
    bl_active_remove(active[request->worker], request->blocks, request->count);
    for (uint32_t i = 0; i < request->count; i++)
        holders[request->worker][request->blocks[i]]--;
}

static int hashes_repeat;       /* a request had arbitrary hashes */

static void fuzz_run(void)
{
    fuzz_request *request = &requests[fuzz_byte() % FUZZ_REQUESTS];
    uint32_t closed;
    if (request->running) {
        fuzz_end(request);
    } else {
        request->worker = fuzz_byte() % FUZZ_WORKERS;
        request->count = fuzz_blocks(request->blocks, &closed);
        request->running = 1;
        hashes_repeat |= !closed;
        fuzz_must(!bl_active_add(active[request->worker], request->blocks, request->count),
                  "a request is added");
        for (uint32_t i = 0; i < request->count; i++)
            holders[request->worker][request->blocks[i]]++;
    }
    fuzz_check_active(request->worker);
}

/* ---- Loads, estimates and costs. */

static bl_load loads[FUZZ_WORKERS];
static bl_prefills prefills[FUZZ_WORKERS];

/* Return a figure that an engine may report (router/metrics.py): 0 to 1e15. */
static int64_t fuzz_figure(void)
{
    static const int64_t edges[] = {0, 1, 2, 16, 470, 65536, 1000000000, 1000000000000000};
    uint8_t kind = fuzz_byte();
    return kind < 128 ? kind : edges[kind % 8];
}

/* Return a finite time or duration, which may be extremely small. */
static double fuzz_time(void)
{
    static const double edges[] = {0, 5e-324, 1e-300, 1e-9, 0.001, 1, 86400, 1e9};
    return edges[fuzz_byte() % 8];
}

static void fuzz_prefills(bl_prefills *row)
{
    *row = (bl_prefills){
        .count = fuzz_byte() % 3,
        .unpredicted = fuzz_byte() % 2,
        .tokens = fuzz_figure(),
        .seconds = fuzz_time(),
        .oldest_tokens = fuzz_figure(),
        .oldest_predicted = fuzz_byte() % 2,
        .oldest_s = fuzz_time(),
        .oldest_since = now_s + fuzz_time() - fuzz_time(),
    };
}

static void fuzz_report(void)
{
    uint32_t worker = fuzz_byte() % FUZZ_WORKERS;
    bl_load *load = &loads[worker];
    load->request_active_slots = fuzz_figure();
    load->request_total_slots = fuzz_figure();
    load->kv_active_blocks = fuzz_figure();
    load->kv_total_blocks = fuzz_figure();
    load->num_requests_waiting = fuzz_figure();
    load->active_requests = fuzz_byte();
    load->active_decode_blocks = bl_active_count(active[worker]);
    load->outstanding_tokens = fuzz_figure();
    fuzz_prefills(&prefills[worker]);
}

/* Fill in the rows, and compare them with the table. Hashes that repeat make them inexact. */
static void fuzz_candidates(const uint64_t *blocks, uint32_t count, int exact, bl_candidate *rows)
{
    static const double alone[] = {1, 0.26, 0.08, 0.03};
    const bl_load *load[FUZZ_WORKERS];
    for (uint32_t i = 0; i < FUZZ_WORKERS; i++)
        load[i] = &loads[i];
    bl_candidates_fill(load, active, FUZZ_WORKERS, blocks, count, alone, 4, rows);
    for (uint32_t i = 0; i < FUZZ_WORKERS; i++) {
        uint32_t held = 0;
        double sum = 0;
        while (held < count && holders[i][blocks[held]])
            held++;
        for (uint32_t at = 0; at < held; at++)
            sum += holders[i][blocks[at]] < 4 ? alone[holders[i][blocks[at]]] : 0;
        fuzz_must(rows[i].new_blocks >= 0 && rows[i].new_blocks <= count, "new blocks are some");
        fuzz_must(rows[i].held_alone >= 0 && rows[i].held_alone <= count, "held blocks are some");
        if (!exact)
            continue;
        fuzz_must(rows[i].new_blocks == count - held, "new blocks are those without holders");
        fuzz_must(fabs(rows[i].held_alone - sum) < 1e-6, "the time alone is summed");
    }
}

static void fuzz_decide(void)
{
    uint64_t blocks[FUZZ_PROMPT_MAX];
    uint32_t closed, count = fuzz_blocks(blocks, &closed);
    bl_candidate rows[FUZZ_WORKERS];
    bl_estimate estimates[FUZZ_WORKERS];
    double costs[FUZZ_WORKERS];
    bl_load *load[FUZZ_WORKERS];
    bl_prefills *waiting[FUZZ_WORKERS];
    for (uint32_t i = 0; i < FUZZ_WORKERS; i++) {
        load[i] = &loads[i];
        waiting[i] = &prefills[i];
    }
    bl_loads_refresh(load, waiting, FUZZ_WORKERS, now_s);
    fuzz_candidates(blocks, count, closed && !hashes_repeat, rows);
    int64_t size = 1 + fuzz_byte() % 64, tail = fuzz_figure() % 100000;
    int64_t fetched[FUZZ_WORKERS] = {0, count, 0, 1};
    for (uint32_t i = 0; i < FUZZ_WORKERS; i++) {
        rows[i].device = fuzz_byte() % (count + 1);
        rows[i].shared = count - rows[i].device;
    }
    bl_costs model = {7.19, 0.07663, 1.521e-6, 18.16, 0.0248, 5.87e-5, 12.0, 26e9, 50e9,
                      1 + fuzz_byte(), size, size * 262144};
    bl_estimates(&model, (count + tail) * size, rows, fuzz_byte() % 2 ? fetched : NULL,
                 FUZZ_WORKERS, estimates);
    bl_pressure pressure = {tail, 1 + fuzz_byte(), 1 + fuzz_byte(), fuzz_time(),
                            fuzz_byte() / 255.0, 1 + fuzz_byte(), fuzz_time()};
    bl_least_costs(&pressure, rows, estimates, FUZZ_WORKERS, costs);
    for (uint32_t i = 0; i < FUZZ_WORKERS; i++) {
        fuzz_must(rows[i].load.active_prefill_tokens >= 0, "no prefill has fewer than no tokens");
        fuzz_must(isfinite(estimates[i].queue_s) && isfinite(estimates[i].prefill_s) &&
                  isfinite(estimates[i].transfer_s) && isfinite(estimates[i].between_tokens_s),
                  "estimates are finite");
        fuzz_must(isfinite(costs[i]), "costs are finite");
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_next = data;
    fuzz_left = size;
    now_s = orders = hashes_repeat = 0;
    ttl_s = 1 + fuzz_byte() % 8;
    sent_max = 1 + fuzz_byte() % 60;
    memset(listed, 0, sizeof listed);
    memset(requests, 0, sizeof requests);
    memset(holders, 0, sizeof holders);
    memset(loads, 0, sizeof loads);
    memset(prefills, 0, sizeof prefills);
    fuzz_must(bl_prefix_create(&prefix, FUZZ_RANKS, sent_max, sent_max) == 0 &&
              bl_sent_create(&sent, prefix, FUZZ_RANKS, sent_max, ttl_s) == 0, "an index is made");
    for (uint32_t i = 0; i < FUZZ_WORKERS; i++)
        fuzz_must(bl_active_create(&active[i]) == 0, "a table is made");
    while (fuzz_left > 0) {
        uint8_t kind = fuzz_byte() % 8;
        if (kind < 4)
            fuzz_send();
        else if (kind < 6)
            fuzz_run();
        else if (kind < 7)
            fuzz_report();
        else
            fuzz_decide();
    }
    for (uint32_t i = 0; i < FUZZ_REQUESTS; i++)
        fuzz_end(&requests[i]);
    for (uint32_t i = 0; i < FUZZ_WORKERS; i++) {
        fuzz_must(bl_active_count(active[i]) == 0, "no block is left");
        bl_active_destroy(active[i]);
    }
    bl_sent_expire(sent, now_s + 2 * ttl_s);
    bl_prefix_stat stat;
    bl_prefix_stat_read(prefix, &stat);
    fuzz_must(!bl_sent_count(sent) && !stat.blocks && !stat.names, "nothing is left");
    bl_sent_destroy(sent);
    bl_prefix_destroy(prefix);
    return 0;
}
