/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Keeps the two sides of an acceptance test in step. A side's line is streamed between fences and
 * read by refetch, the minimum that the memory must support. A line has the nonces of both runs, so
 * the line of an earlier run is rejected.
 */
#include "verify/acceptance.h"

#include <errno.h>

#include "format/line.h"
#include "coherence/wait.h"

static uint64_t bl_acceptance_line_offset(const bl_acceptance *acceptance, uint32_t role,
                                          uint64_t step)
{
    return acceptance->scratch[0] + (2 * role + step % 2) * BL_POLL_STRIDE;
}

static void bl_acceptance_write(bl_acceptance *acceptance, uint64_t first, uint64_t second)
{
    const bl_memory *memory = &acceptance->pool.memory;
    uint32_t role = acceptance->config.role;
    bl_acceptance_line line = {
        .nonce = acceptance->nonce,
        .peer_nonce = acceptance->peer_nonce,
        .step = acceptance->step,
        .word = {first, second},
    };
    line.check = bl_table_check(&line, role);
    bl_fence_full(memory); /* all accesses before this step are complete */
    bl_stream_line(memory, bl_acceptance_line_offset(acceptance, role, acceptance->step),
                   &line); /* SYNC verify.step */
    bl_fence_full(memory); /* no load of the next step precedes the publication of this line */
}

/* Read the peer's line of a step from memory. Returns 1 if it is whole. */
static int bl_acceptance_read(const bl_acceptance *acceptance, uint64_t step,
                              bl_acceptance_line *line)
{
    const bl_memory *memory = &acceptance->pool.memory;
    uint32_t peer = 1 - acceptance->config.role;
    uint64_t offset = bl_acceptance_line_offset(acceptance, peer, step);
    bl_refetch(memory, offset, BL_LINE_SIZE);
    bl_load_line(memory, offset, line); /* SYNC verify.step: pairs with bl_acceptance_write() */
    return line->nonce != 0 && line->check == bl_table_check(line, peer);
}

int bl_acceptance_meet(bl_acceptance *acceptance)
{
    const bl_memory *memory = &acceptance->pool.memory;
    uint32_t peer = 1 - acceptance->config.role;
    bl_wait wait = bl_wait_make(memory, acceptance->config.patience_ns);
    bl_acceptance_write(acceptance, 0, 0);
    for (;;) {
        bl_acceptance_line line;
        if (bl_acceptance_read(acceptance, 0, &line) && line.step == 0) {
            bl_believe(memory, bl_acceptance_line_offset(acceptance, peer, 0));
            if (line.nonce != acceptance->peer_nonce) {
                acceptance->peer_nonce = line.nonce;
                bl_acceptance_write(acceptance, 0, 0);
            }
            if (line.peer_nonce == acceptance->nonce)
                return 0;
        }
        if (bl_shared_load(&acceptance->stopped))
            return -ECANCELED;
        if (!bl_wait_turn(memory, &wait))
            return -ETIMEDOUT;
    }
}

void bl_acceptance_publish(bl_acceptance *acceptance, uint64_t first, uint64_t second)
{
    acceptance->step++;
    bl_acceptance_write(acceptance, first, second);
}

int bl_acceptance_poll(bl_acceptance *acceptance, uint32_t ahead)
{
    bl_acceptance_line line;
    uint64_t step = acceptance->step + ahead;
    if (!bl_acceptance_read(acceptance, step, &line) || line.step != step ||
        line.nonce != acceptance->peer_nonce || line.peer_nonce != acceptance->nonce)
        return 0;
    bl_believe(&acceptance->pool.memory,
               bl_acceptance_line_offset(acceptance, 1 - acceptance->config.role, step));
    acceptance->received = line;
    return 1;
}

int bl_acceptance_receive(bl_acceptance *acceptance)
{
    const bl_memory *memory = &acceptance->pool.memory;
    bl_wait wait = bl_wait_make(memory, acceptance->config.patience_ns);
    while (!bl_acceptance_poll(acceptance, 0)) {
        if (bl_shared_load(&acceptance->stopped))
            return -ECANCELED;
        if (!bl_wait_turn(memory, &wait))
            return -EPIPE;
    }
    return 0;
}

void bl_acceptance_finish(const bl_acceptance *acceptance)
{
    const bl_memory *memory = &acceptance->pool.memory;
    bl_wait wait = bl_wait_make(memory, acceptance->config.patience_ns);
    bl_acceptance_line line[2];
    do {
        for (uint64_t i = 0; i < 2; i++)
            bl_acceptance_read(acceptance, i, &line[i]);
        if (line[0].check == 0 && line[1].check == 0)
            return;
    } while (!bl_shared_load(&acceptance->stopped) && bl_wait_turn(memory, &wait));
}

void bl_acceptance_fall_silent(const bl_acceptance *acceptance)
{
    const bl_memory *memory = &acceptance->pool.memory;
    static const uint8_t zeros[BL_LINE_SIZE];
    for (uint64_t i = 0; i < 2; i++)
        bl_stream_line(memory, bl_acceptance_line_offset(acceptance, acceptance->config.role, i),
                       zeros);
    bl_fence_full(memory);
}
