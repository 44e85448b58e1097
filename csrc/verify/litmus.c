/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The litmus programs of `beluga verify`, each for an initiator and in two modes.
 *
 *   coherence   by the rules of coherence/coherence.h: must hold on every device
 *   bare        plain stores and loads (verify/raw.h): hold if the hosts' caches are coherent
 *
 * At the start and end of a trial its area is in no cache. No result depends on a clock: a read
 * that must return new data comes after the peer's step that published it.
 */
#include "verify/acceptance.h"

#include "format/line.h"
#include "verify/raw.h"

/* The result of one trial on one side. */
typedef struct bl_trial {
    bl_acceptance *acceptance;
    const bl_memory *memory;
    uint64_t area;              /* offset */
    uint64_t number;            /* number of the trial, and the value that it writes */
    uint32_t bare;
    uint32_t initiates;
    uint64_t violations;        /* observed by this side */
    uint64_t rejected;
} bl_trial;

static uint64_t bl_trial_random(bl_trial *trial)
{
    uint64_t random = trial->acceptance->random;
    random ^= random << 13, random ^= random >> 7, random ^= random << 17;
    return trial->acceptance->random = random;
}

/* Wait until both sides reach the same point. */
static int bl_trial_meet(bl_trial *trial)
{
    bl_acceptance_publish(trial->acceptance, 0, 0);
    return bl_acceptance_receive(trial->acceptance);
}

static void bl_trial_fill(uint64_t line[8], uint64_t word)
{
    for (int i = 0; i < 8; i++)
        line[i] = word;
}

static void bl_trial_put(const bl_trial *trial, uint64_t offset, const uint64_t line[8])
{
    if (trial->bare)
        bl_raw_store(trial->memory, offset, line, BL_LINE_SIZE, trial->acceptance->raw_width);
    else
        bl_stream_line(trial->memory, offset, line);
}

static uint64_t bl_trial_look(const bl_trial *trial, uint64_t offset)
{
    uint64_t word;
    if (!trial->bare)
        bl_refetch(trial->memory, offset, BL_LINE_SIZE);
    bl_raw_load(trial->memory, offset, &word, sizeof word);
    return word;
}

/* ---- Message passing, also with prefetches of lines that are not written yet. */

static int bl_trial_send(bl_trial *trial)
{
    uint64_t line[8];
    bl_trial_fill(line, trial->number);
    for (uint32_t i = 1; i <= BL_ACCEPTANCE_PAYLOAD; i++)
        bl_trial_put(trial, trial->area + i * BL_LINE_SIZE, line);
    if (!trial->bare)
        bl_fence_store(trial->memory);
    bl_trial_put(trial, trial->area, line);
    bl_acceptance_publish(trial->acceptance, 0, 0);
    return bl_acceptance_receive(trial->acceptance);
}

static void bl_trial_prefetch(const bl_trial *trial)
{
    for (uint32_t i = 1; i <= BL_ACCEPTANCE_PAYLOAD; i++)
        bl_prefetch_line(trial->memory, trial->area + i * BL_LINE_SIZE);
}

static int bl_trial_receive(bl_trial *trial, int prefetches)
{
    uint64_t payload[BL_ACCEPTANCE_PAYLOAD * 8];
    for (int received = 0; !received;) {
        /* Polled before the read: if the flag was set, the read must return the data. */
        received = bl_acceptance_poll(trial->acceptance, 1);
        if (prefetches)
            bl_trial_prefetch(trial);
        if (bl_trial_look(trial, trial->area) == trial->number)
            break;
        if (received)
            trial->violations = 1;
        else if (bl_shared_load(&trial->acceptance->stopped))
            break;
        bl_pause(trial->memory);
    }
    if (!trial->bare) {
        bl_fence_full(trial->memory); /* after the load of the flag */
        bl_invalidate(trial->memory, trial->area + BL_LINE_SIZE, sizeof payload);
        bl_fence_full(trial->memory);
    }
    bl_raw_load(trial->memory, trial->area + BL_LINE_SIZE, payload, sizeof payload);
    for (uint32_t i = 0; i < sizeof payload / sizeof *payload; i++)
        if (payload[i] != trial->number)
            trial->violations = 1;
    bl_acceptance_publish(trial->acceptance, trial->violations, 0);
    return bl_acceptance_receive(trial->acceptance);
}

static int bl_trial_pass(bl_trial *trial, int prefetches)
{
    if (!trial->initiates && prefetches)
        bl_trial_prefetch(trial);
    int status = bl_trial_meet(trial);
    if (status < 0)
        return status;
    return trial->initiates ? bl_trial_send(trial) : bl_trial_receive(trial, prefetches);
}

/* ---- Store buffering: of two sides that write first and then read, at least one must read the
 * other's store. */

static int bl_trial_buffer(bl_trial *trial)
{
    uint32_t mine = trial->acceptance->config.role;
    uint64_t missed = 0, line[8];
    bl_trial_fill(line, trial->number);
    int status = bl_trial_meet(trial);
    if (status < 0)
        return status;
    for (uint64_t turns = bl_trial_random(trial) % 32; turns > 0; turns--)
        bl_pause(trial->memory); /* either side may be first */
    for (uint32_t i = 0; i < BL_ACCEPTANCE_PAIRS; i++) {
        uint64_t pair = trial->area + i * 2 * BL_POLL_STRIDE, word;
        bl_trial_put(trial, pair + mine * BL_POLL_STRIDE, line);
        bl_fence_full(trial->memory); /* orders the load after the store */
        if (!trial->bare) {
            bl_invalidate(trial->memory, pair + (1 - mine) * BL_POLL_STRIDE, BL_LINE_SIZE);
            bl_fence_full(trial->memory);
        }
        bl_raw_load(trial->memory, pair + (1 - mine) * BL_POLL_STRIDE, &word, sizeof word);
        missed |= (uint64_t)(word != trial->number) << i;
    }
    bl_acceptance_publish(trial->acceptance, missed, 0);
    status = bl_acceptance_receive(trial->acceptance);
    missed &= trial->acceptance->received.word[0];
    trial->violations = (uint64_t)__builtin_popcountll(missed); /* both sides have the same count */
    return status;
}

/* ---- Tearing: a unit is stored repeatedly while the other side reads it. In coherence mode, 8
 * bytes must never be torn, and a larger unit that passes its check must be whole. */

static void bl_trial_tear_fill(const bl_trial *trial, uint32_t size, uint32_t i, uint64_t line[8])
{
    uint64_t half = (uint32_t)(trial->number * 2 * BL_ACCEPTANCE_UNITS + i);
    bl_trial_fill(line, half << 32 | half);
    if (!trial->bare && size > 8) /* a check at the end, as in bl_entry */
        line[7] = (uint64_t)bl_table_check(line, 0) << 32 | half;
}

static int bl_trial_tear_write(bl_trial *trial, uint32_t size)
{
    uint64_t line[8];
    for (uint32_t i = 1; i <= BL_ACCEPTANCE_UNITS; i++) {
        bl_trial_tear_fill(trial, size, i, line);
        if (trial->bare)
            bl_raw_store(trial->memory, trial->area, line, size, trial->acceptance->raw_width);
        else
            bl_publish_line(trial->memory, trial->area, line);
        bl_pause(trial->memory);
    }
    bl_acceptance_publish(trial->acceptance, 0, 0);
    return bl_acceptance_receive(trial->acceptance);
}

/* Read the unit once. Returns 1 if all of it comes from the same store. */
static int bl_trial_tear_look(bl_trial *trial, uint32_t size)
{
    uint64_t line[8] = {0}, word;
    if (trial->bare) {
        bl_raw_load(trial->memory, trial->area, line, size);
    } else {
        bl_refetch(trial->memory, trial->area, BL_LINE_SIZE);
        bl_load_line(trial->memory, trial->area, line);
        if (size > 8 &&
            !bl_verify(trial->memory, line[7] >> 32 == bl_table_check(line, 0))) {
            trial->rejected++;
            return 1;
        }
        line[7] = (uint64_t)(uint32_t)line[7] << 32 | (uint32_t)line[7];
    }
    word = (uint64_t)(uint32_t)line[0] << 32 | (uint32_t)line[0];
    for (uint32_t i = 0; i < size / sizeof word; i++)
        if (line[i] != word)
            return 0;
    return 1;
}

static int bl_trial_tear_read(bl_trial *trial, uint32_t size)
{
    for (int received = 0; !received && !bl_shared_load(&trial->acceptance->stopped);) {
        received = bl_acceptance_poll(trial->acceptance, 1);
        for (uint32_t i = 0; i < BL_ACCEPTANCE_UNITS; i++)
            trial->violations += !bl_trial_tear_look(trial, size);
    }
    bl_acceptance_publish(trial->acceptance, trial->violations, trial->rejected);
    return bl_acceptance_receive(trial->acceptance);
}

static int bl_trial_tear(bl_trial *trial, uint32_t size)
{
    uint64_t line[8];
    bl_trial_tear_fill(trial, size, 0, line);
    if (trial->initiates) /* a whole unit from the start */
        bl_publish_line(trial->memory, trial->area, line);
    int status = bl_trial_meet(trial);
    if (status < 0)
        return status;
    return trial->initiates ? bl_trial_tear_write(trial, size) : bl_trial_tear_read(trial, size);
}

/* ---- Late eviction: the initiator stores into a line, which the other side writes next. The copy
 * in the initiator's cache is then evicted late, here by a flush. */

static int bl_trial_evict_late(bl_trial *trial)
{
    uint64_t line[8];
    int status = bl_trial_meet(trial);
    if (status == 0 && trial->initiates) {
        bl_trial_fill(line, ~trial->number);
        bl_raw_store(trial->memory, trial->area, line, BL_LINE_SIZE,
                     trial->acceptance->raw_width);
        if (!trial->bare)
            bl_refetch(trial->memory, trial->area, BL_LINE_SIZE); /* before the other side writes
                                                                   * it */
    }
    if (status == 0)
        status = bl_trial_meet(trial);
    if (status == 0 && !trial->initiates) {
        bl_trial_fill(line, trial->number);
        bl_trial_put(trial, trial->area, line);
        bl_refetch(trial->memory, trial->area, BL_LINE_SIZE); /* out of this cache, too */
    }
    if (status == 0)
        status = bl_trial_meet(trial);
    if (status == 0 && trial->initiates)
        bl_refetch(trial->memory, trial->area, BL_LINE_SIZE); /* the late eviction */
    if (status == 0)
        status = bl_trial_meet(trial);
    if (status < 0)
        return status;
    bl_refetch(trial->memory, trial->area, BL_LINE_SIZE);
    trial->violations = !trial->initiates && bl_load64(trial->memory, trial->area) != trial->number;
    bl_acceptance_publish(trial->acceptance, trial->violations, 0);
    return bl_acceptance_receive(trial->acceptance);
}

static int bl_trial_run(bl_trial *trial, uint32_t test)
{
    switch (test) {
    case BL_ACCEPTANCE_MESSAGE_PASSING:
        return bl_trial_pass(trial, 0);
    case BL_ACCEPTANCE_STORE_BUFFERING:
        return bl_trial_buffer(trial);
    case BL_ACCEPTANCE_LATE_EVICTION:
        return bl_trial_evict_late(trial);
    case BL_ACCEPTANCE_PREFETCH:
        return bl_trial_pass(trial, 1);
    default:
        return bl_trial_tear(trial, 8u << (test - BL_ACCEPTANCE_TEARING_8));
    }
}

int bl_acceptance_trial(bl_acceptance *acceptance, bl_acceptance_cell *cell)
{
    uint64_t number = ++acceptance->number;
    bl_trial trial = {
        .acceptance = acceptance,
        .memory = &acceptance->pool.memory,
        .area = acceptance->scratch[cell->place] +
                (1 + number % BL_ACCEPTANCE_AREA_COUNT) * BL_ACCEPTANCE_AREA,
        .number = number,
        .bare = cell->mode == BL_ACCEPTANCE_BARE,
        .initiates = cell->initiator == acceptance->config.role,
    };
    int status = bl_trial_run(&trial, cell->test);
    if (status < 0)
        return status;
    bl_refetch(trial.memory, trial.area, BL_ACCEPTANCE_AREA); /* complete at the next step */
    int reported = cell->test != BL_ACCEPTANCE_STORE_BUFFERING && trial.initiates;
    cell->trials++;
    cell->violations += reported ? acceptance->received.word[0] : trial.violations;
    cell->rejected += reported ? acceptance->received.word[1] : trial.rejected;
    return 0;
}
