/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The state of one direction of a link: its tree of classes, its members, and the audit
 * (iosched/link.h).
 */
#include "iosched/link.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/host_atomic.h"
#include "iosched/process.h"

/* The magic includes the size, so a process with different structs rejects the memory. */
static const uint64_t BL_LINK_MAGIC = 0x3177676c65626262 + sizeof(bl_direction);

/* Tokens are picoseconds, so this is the rate of time and not the speed of the link. */
static const uint64_t BL_LINK_RATE = 1000000000000;

/* Members are inspected once in BL_REAP_NS. A member that did not poll for BL_SILENT_NS loses its
 * tokens: its process is stopped, or died in another pid namespace. If the process resumes, it
 * takes a new member. */
static const uint64_t BL_REAP_NS = 10000000;
static const uint64_t BL_SILENT_NS = 5000000000;

static const uint64_t BL_BANDWIDTH_TOKEN = 512; /* bytes; Seastar's */
static const uint64_t BL_BANDWIDTH_STEP = (128 << 10) / 512;

int bl_direction_init(bl_direction *direction, uint64_t limit, uint64_t forgiving, int capped,
                      uint64_t now_ns)
{
    *direction = (bl_direction){.node_count = 1, .forgiving = forgiving, .reaped_ns = now_ns};
    direction->nodes[0].shares = 1;
    int status = bl_tokens_init(&direction->bucket, BL_LINK_RATE, limit, 1, capped, now_ns);
    if (status == 0)
        bl_host_store(&direction->magic, BL_LINK_MAGIC);
    return status;
}

int bl_direction_valid(const bl_direction *direction)
{
    if (bl_host_load(&direction->magic) != BL_LINK_MAGIC || direction->node_count < 1 ||
        direction->node_count > BL_LINK_NODES || direction->bucket.rate != BL_LINK_RATE ||
        bl_host_load(&direction->bucket.limit) == 0)
        return 0;
    for (uint32_t i = 1; i < direction->node_count; i++)
        if (direction->nodes[i].shares == 0 || direction->nodes[i].parent >= i)
            return 0;
    return 1;
}

int bl_direction_add(bl_direction *direction, uint32_t parent, uint32_t shares)
{
    uint64_t node = direction->node_count;
    if (parent >= node || shares == 0)
        return -EINVAL;
    if (node == BL_LINK_NODES)
        return -ENOSPC;
    direction->nodes[node] = (bl_node){.shares = shares, .parent = parent};
    bl_host_store(&direction->node_count, node + 1);
    return (int)node;
}

int bl_direction_set_shares(bl_direction *direction, uint32_t node, uint32_t shares)
{
    if (node == 0 || node >= direction->node_count || shares == 0)
        return -EINVAL;
    bl_host_store(&direction->nodes[node].shares, shares);
    return 0;
}

int bl_direction_limit(bl_direction *direction, uint32_t node, uint64_t bytes_per_s, uint64_t burst,
                       uint64_t now_ns)
{
    if (node == 0 || node >= direction->node_count)
        return -EINVAL;
    bl_tokens *bandwidth = &direction->nodes[node].bandwidth;
    if (bytes_per_s == 0) {
        bl_host_store(&bandwidth->rate, 0);
        return 0;
    }
    return bl_tokens_init(bandwidth, (bytes_per_s + BL_BANDWIDTH_TOKEN - 1) / BL_BANDWIDTH_TOKEN,
                          burst / BL_BANDWIDTH_TOKEN, BL_BANDWIDTH_STEP, 0, now_ns);
}

/* ---- Liveness of a member's process */

/* Returns when a process started, in ticks since boot; 0 if there is no such process, 1 if the time
 * is unknown. A pid may be reused, but not with the same start time. */
static uint64_t bl_process_start(uint32_t pid)
{
    char path[32], text[1024];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return kill((pid_t)pid, 0) < 0 && errno == ESRCH ? 0 : 1;
    ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    if (size <= 0)
        return size < 0 && errno == ESRCH ? 0 : 1;
    text[size] = 0;
    const char *field = strrchr(text, ')'); /* the name before it may contain anything */
    if (field == NULL || field[1] == 0 || field[2] == 'Z' || field[2] == 'X')
        return field != NULL ? 0 : 1;
    for (int skipped = 0; skipped < 20 && field != NULL; skipped++)
        field = strchr(field + 1, ' ');
    uint64_t start = field == NULL ? 0 : strtoull(field, NULL, 10);
    return start > 0 ? start : 1;
}

static int bl_member_gone(const bl_member *member, uint64_t owner, uint64_t pids, uint64_t now_ns)
{
    uint64_t started = bl_host_load(&member->started);
    int foreign = started > 0 && bl_host_load(&member->pids) != pids;
    if (started > 0 && (foreign || bl_host_load(&member->held) > 0) &&
        bl_host_ahead(now_ns, bl_host_load(&member->seen_ns)) > (int64_t)BL_SILENT_NS)
        return 1;
    if (foreign)
        return 0;
    uint64_t found = bl_process_start((uint32_t)owner);
    return found == 0 || (started > 1 && found > 1 && found != started);
}

/* ---- Members */

/* Returns how many members were ever taken, at most BL_LINK_MEMBERS. */
static uint32_t bl_member_count(const bl_direction *direction)
{
    uint64_t count = bl_host_load(&direction->member_count);
    return count < BL_LINK_MEMBERS ? (uint32_t)count : BL_LINK_MEMBERS;
}

/* Returns a new number for the owner of a member, or for the process that clears it. */
static uint64_t bl_owner_make(bl_direction *direction)
{
    return bl_host_add(&direction->owner_count, 1) << 32 | (uint32_t)getpid();
}

int bl_member_take(bl_direction *direction, uint64_t now_ns, uint64_t *owner)
{
    uint64_t pids = bl_pid_namespace(), started = bl_process_start((uint32_t)getpid());
    *owner = bl_owner_make(direction);
    for (int attempt = 0; attempt < 2; attempt++) {
        for (uint32_t i = 0; i < BL_LINK_MEMBERS; i++) {
            bl_member *member = &direction->members[i];
            if (bl_host_load(&member->owner) != 0)
                continue;
            bl_host_raise(&direction->member_count, i + 1);
            if (!bl_host_swap(&member->owner, 0, *owner))
                continue;
            bl_host_store(&member->pids, pids);
            bl_host_store(&member->seen_ns, now_ns);
            bl_host_store(&member->started, started);
            return (int)i;
        }
        bl_direction_reap(direction, now_ns);
    }
    return -ENOSPC;
}

/* Release a member's tokens. If this process dies here, the member has this process's pid as its
 * owner and is reaped later. */
static void bl_member_clear(bl_direction *direction, bl_member *member)
{
    uint64_t pending = bl_host_load(&member->pending);
    bl_host_store(&member->pending, 0);
    if (pending > 0 && !direction->bucket.capped)
        bl_tokens_refund(&direction->bucket, pending);
    bl_host_store(&member->held, 0);
    bl_host_store(&member->demand, 0);
    bl_host_store(&member->turn, 0);
    bl_host_store(&member->started, 0);
    if (direction->bucket.capped)
        bl_host_add(&direction->suspect, 1);
    bl_host_store(&member->owner, 0);
}

void bl_member_drop(bl_direction *direction, uint32_t index, uint64_t owner)
{
    uint64_t mine = bl_owner_make(direction);
    if (bl_host_swap(&direction->members[index].owner, owner, mine)) {
        bl_member_clear(direction, &direction->members[index]);
        bl_direction_watch(direction, bl_host_load(&direction->reaped_ns));
    }
}

int bl_direction_reap(bl_direction *direction, uint64_t now_ns)
{
    uint64_t pids = bl_pid_namespace();
    uint32_t count = bl_member_count(direction);
    int freed = 0;
    for (uint32_t i = 0; i < count; i++) {
        bl_member *member = &direction->members[i];
        uint64_t owner = bl_host_load(&member->owner);
        if (owner == 0 || !bl_member_gone(member, owner, pids, now_ns))
            continue;
        bl_host_store(&member->started, 0); /* from here on, liveness is that of the clearing
                                             * process's pid */
        if (bl_host_swap(&member->owner, owner, bl_owner_make(direction))) {
            bl_member_clear(direction, member);
            bl_host_add(&direction->reaped, 1);
            freed++;
        }
    }
    return freed;
}

uint64_t bl_member_grab(bl_direction *direction, bl_member *member, uint64_t tokens)
{
    bl_host_exchange(&member->turn, member->turn + 1);
    uint64_t ticket = bl_tokens_grab(&direction->bucket, tokens);
    bl_host_store(&member->held, member->held + tokens);
    bl_host_store(&member->pending, member->pending + tokens);
    bl_host_exchange(&member->turn, member->turn + 1);
    return ticket;
}

void bl_member_refund(bl_direction *direction, bl_member *member, uint64_t tokens)
{
    bl_host_exchange(&member->turn, member->turn + 1);
    bl_host_store(&member->pending, member->pending - tokens);
    bl_tokens_refund(&direction->bucket, tokens);
    bl_host_store(&member->held, member->held - tokens);
    bl_host_exchange(&member->turn, member->turn + 1);
}

void bl_member_release(bl_direction *direction, bl_member *member, uint64_t tokens)
{
    bl_host_exchange(&member->turn, member->turn + 1);
    bl_tokens_release(&direction->bucket, tokens);
    bl_host_store(&member->held, member->held - tokens);
    bl_host_exchange(&member->turn, member->turn + 1);
}

/* If the process dies here, its member's turn stays odd: the member is cleared, and the audit
 * corrects ceil. */
void bl_member_widen(bl_direction *direction, bl_member *member, uint64_t limit)
{
    uint64_t found = bl_host_load(&direction->bucket.limit);
    if (found >= limit)
        return;
    bl_host_exchange(&member->turn, member->turn + 1);
    while (found < limit && !bl_host_swap(&direction->bucket.limit, found, limit))
        found = bl_host_load(&direction->bucket.limit);
    if (found < limit)
        bl_host_add(&direction->bucket.ceil, limit - found);
    bl_host_exchange(&member->turn, member->turn + 1);
}

uint32_t bl_direction_demand(const bl_direction *direction, const bl_member *own, uint64_t now_ns,
                             uint32_t *engines)
{
    uint32_t mask = 0, count = bl_member_count(direction);
    *engines = 1;
    for (uint32_t i = 0; i < count; i++) {
        const bl_member *member = &direction->members[i];
        uint32_t demand = (uint32_t)bl_host_load(&member->demand);
        if (member == own || demand == 0 ||
            bl_host_ahead(now_ns, bl_host_load(&member->until_ns)) > 0)
            continue;
        mask |= demand;
        ++*engines;
    }
    return mask;
}

/* ---- The audit */

/* Read all members and the bucket. If none of them changed meanwhile, correct ceil. */
static void bl_direction_audit(bl_direction *direction)
{
    uint64_t turns[BL_LINK_MEMBERS], owners[BL_LINK_MEMBERS], held = 0;
    uint64_t suspect = bl_host_load(&direction->suspect);
    uint32_t count = bl_member_count(direction);
    bl_tokens *bucket = &direction->bucket;
    uint64_t tail = bl_host_load(&bucket->tail), ceil = bl_host_load(&bucket->ceil);
    uint64_t limit = bl_host_load(&bucket->limit);
    for (uint32_t i = 0; i < count; i++) {
        const bl_member *member = &direction->members[i];
        owners[i] = bl_host_load(&member->owner);
        turns[i] = bl_host_load(&member->turn);
        if (turns[i] % 2 == 1)
            return;
        held += bl_host_load(&member->held);
    }
    for (uint32_t i = 0; i < count; i++)
        if (bl_host_load(&direction->members[i].turn) != turns[i] ||
            bl_host_load(&direction->members[i].owner) != owners[i])
            return;
    if (bl_host_load(&direction->bucket.tail) != tail)
        return;
    int64_t lost = bl_host_ahead(tail + limit - held, ceil);
    /* Members may have changed since, by equal amounts on both sides. If ceil changed, the exchange
     * fails. */
    if (lost == 0 || bl_host_swap(&direction->bucket.ceil, ceil, ceil + (uint64_t)lost)) {
        bl_host_add(&direction->audited, lost < 0 ? -(uint64_t)lost : (uint64_t)lost);
        bl_host_swap(&direction->suspect, suspect, 0);
    }
}

void bl_direction_watch(bl_direction *direction, uint64_t now_ns)
{
    uint64_t last = bl_host_load(&direction->reaped_ns);
    if (bl_host_ahead(now_ns, last) > (int64_t)BL_REAP_NS &&
        bl_host_swap(&direction->reaped_ns, last, now_ns))
        bl_direction_reap(direction, now_ns);
    if (bl_host_load(&direction->suspect) != 0)
        bl_direction_audit(direction);
}
