/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Executes a descriptor: see dsa/execute.h. Bytes pass through a small buffer, so that the source
 * is read once and a checksum covers what was stored. Without the cache-control flag they are
 * streamed.
 */
#include "dsa/execute.h"

#include "dsa/queue.h"
#include "coherence/guard.h"
#include "pool/pool.h"

enum { BL_DSA_STAGE_SIZE = 4 << 10 };

/* What an opcode accepts: flags besides that of a record, and opcode-specific bytes. */
typedef struct bl_dsa_trait {
    uint32_t flags;
    uint8_t known;
    uint8_t moves;              /* 1: it has a size */
    uint8_t sources;            /* 1: source; 2: and source2 */
    uint8_t targets;            /* 1: target; 2: and target2 */
    uint8_t specific;           /* opcode-specific bytes in use */
} bl_dsa_trait;

enum {
    BL_DSA_COMMON = BL_DSA_CRAV | BL_DSA_RCR | BL_DSA_FENCE,
    BL_DSA_STORES = BL_DSA_BOF | BL_DSA_CC | BL_DSA_STORD | BL_DSA_DRDBK | BL_DSA_DSTS
};

static const bl_dsa_trait bl_dsa_traits[256] = {
    [BL_DSA_NOOP] = {0, 1, 0, 0, 0, 0},
    [BL_DSA_BATCH] = {0, 1, 0, 0, 0, 0},
    [BL_DSA_DRAIN] = {0, 1, 0, 0, 0, 0},
    [BL_DSA_MEMMOVE] = {BL_DSA_STORES, 1, 1, 1, 1, 0},
    [BL_DSA_FILL] = {BL_DSA_STORES, 1, 1, 0, 1, 0},
    [BL_DSA_COMPARE] = {BL_DSA_BOF | BL_DSA_CR, 1, 1, 2, 0, 1},
    [BL_DSA_DUALCAST] = {BL_DSA_STORES, 1, 1, 1, 2, 8},
    [BL_DSA_CRCGEN] = {BL_DSA_BOF | BL_DSA_SEED_READ, 1, 1, 1, 0, 16},
    [BL_DSA_COPY_CRC] = {BL_DSA_STORES | BL_DSA_SEED_READ, 1, 1, 1, 1, 16},
    [BL_DSA_CFLUSH] = {BL_DSA_BOF | BL_DSA_CC, 1, 1, 0, 1, 0},
};

static int bl_dsa_overlap(uint64_t a, uint64_t b, uint32_t size)
{
    return a < b + size && b < a + size;
}

static uint32_t bl_dsa_flag_refusal(const bl_dsa_setting *setting,
                                    const bl_dsa_descriptor *descriptor, bl_dsa_record *record)
{
    uint32_t flags = bl_dsa_flags(descriptor);
    uint32_t allowed = bl_dsa_traits[bl_dsa_opcode(descriptor)].flags | BL_DSA_COMMON;
    if (!setting->in_batch)
        allowed &= ~(uint32_t)BL_DSA_FENCE;
    if (!setting->limits->block_on_fault)
        allowed &= ~(uint32_t)BL_DSA_BOF;
    record->invalid_flags = flags & ~allowed;
    if ((flags & BL_DSA_RCR) && !(flags & BL_DSA_CRAV))
        record->invalid_flags |= BL_DSA_RCR;
    return record->invalid_flags ? BL_DSA_INVALID_FLAGS : BL_DSA_NONE;
}

static int bl_dsa_reserved_used(const bl_dsa_descriptor *descriptor)
{
    uint32_t used = descriptor->reserved | descriptor->interrupt |
                    (descriptor->pasid_privilege & 0x7ff00000);
    const bl_dsa_trait *trait = &bl_dsa_traits[bl_dsa_opcode(descriptor)];
    for (uint32_t i = trait->specific; i < sizeof descriptor->specific; i++)
        used |= descriptor->specific[i];
    if (trait->specific == 16)
        used |= descriptor->seed_reserved;
    return used != 0;
}

uint32_t bl_dsa_refusal(const bl_dsa_setting *setting, const bl_dsa_descriptor *descriptor,
                        bl_dsa_record *record)
{
    uint32_t opcode = bl_dsa_opcode(descriptor);
    const bl_dsa_trait *trait = &bl_dsa_traits[opcode];
    if (!trait->known || (setting->in_batch && (opcode == BL_DSA_BATCH || opcode == BL_DSA_DRAIN)))
        return BL_DSA_BAD_OPCODE;
    uint32_t why = bl_dsa_flag_refusal(setting, descriptor, record);
    if (why != BL_DSA_NONE)
        return why;
    if (bl_dsa_reserved_used(descriptor))
        return BL_DSA_NOZERO_RESERVE;
    if (opcode == BL_DSA_BATCH) {
        if (descriptor->count < 2 || descriptor->count > setting->limits->batch_max)
            return BL_DSA_DESC_CNT_ERANGE;
        return descriptor->list % BL_LINE_SIZE > 0 ? BL_DSA_DESCLIST_ALIGN : BL_DSA_NONE;
    }
    if (trait->moves && (descriptor->size == 0 || descriptor->size > setting->limits->size_max))
        return BL_DSA_XFER_ERANGE;
    if (opcode == BL_DSA_COPY_CRC &&
        bl_dsa_overlap(descriptor->source, descriptor->target, descriptor->size))
        return BL_DSA_OVERLAP_BUFFERS;
    if (opcode == BL_DSA_DUALCAST) {
        if (descriptor->target % BL_PAGE_SIZE != descriptor->target2 % BL_PAGE_SIZE)
            return BL_DSA_DCAST_ERR;
        if (bl_dsa_overlap(descriptor->source, descriptor->target, descriptor->size) ||
            bl_dsa_overlap(descriptor->source, descriptor->target2, descriptor->size) ||
            bl_dsa_overlap(descriptor->target, descriptor->target2, descriptor->size))
            return BL_DSA_OVERLAP_BUFFERS;
    }
    if ((bl_dsa_flags(descriptor) & BL_DSA_SEED_READ) && descriptor->seed_address % 4 > 0)
        return BL_DSA_ADDR_ALIGN;
    return BL_DSA_NONE;
}

/* The progress of a descriptor. It stays correct across a SIGBUS. */
typedef struct bl_dsa_run {
    const bl_dsa_descriptor *descriptor;
    uint32_t size;              /* bytes to execute */
    uint32_t done;
    uint32_t crc;
    uint32_t differ;
} bl_dsa_run;

static void bl_dsa_store(const bl_dsa_descriptor *descriptor, uint64_t target, const void *source,
                         uint32_t size)
{
    if (bl_dsa_flags(descriptor) & BL_DSA_CC)
        memcpy((void *)target, source, size);
    else
        bl_ntstore_copy((void *)target, source, size);
}

static void bl_dsa_fetch(const bl_dsa_run *run, uint8_t *stage, uint32_t size)
{
    const bl_dsa_descriptor *descriptor = run->descriptor;
    if (bl_dsa_opcode(descriptor) != BL_DSA_FILL) {
        memcpy(stage, (const void *)(descriptor->source + run->done), size);
        return;
    }
    const uint8_t *pattern = (const uint8_t *)&descriptor->pattern;
    for (uint32_t i = 0; i < size; i++)
        stage[i] = pattern[(run->done + i) % sizeof descriptor->pattern];
}

/* Execute the next size bytes. Returns 1 at a comparison's first difference. */
static int bl_dsa_run_step(bl_dsa_run *run, uint32_t size)
{
    const bl_dsa_descriptor *descriptor = run->descriptor;
    const bl_dsa_trait *trait = &bl_dsa_traits[bl_dsa_opcode(descriptor)];
    uint8_t stage[BL_DSA_STAGE_SIZE];
    bl_dsa_fetch(run, stage, size);
    if (trait->sources == 2) {
        const uint8_t *other = (const uint8_t *)descriptor->source2 + run->done;
        for (uint32_t i = 0; i < size; i++)
            if (stage[i] != other[i]) {
                run->done += i;
                run->differ = 1;
                return 1;
            }
    }
    if (trait->targets > 0)
        bl_dsa_store(descriptor, descriptor->target + run->done, stage, size);
    if (trait->targets == 2)
        bl_dsa_store(descriptor, descriptor->target2 + run->done, stage, size);
    if (trait->specific == 16)
        run->crc = bl_crc32c(run->crc, stage, size);
    run->done += size;
    bl_compiler_barrier(); /* this value must be stored before a fault of the next step */
    return 0;
}

/* Execute an overlapping move as a whole or not at all: half of it would overwrite part of the
 * source. */
static void bl_dsa_run_move(bl_dsa_run *run)
{
    const bl_dsa_descriptor *descriptor = run->descriptor;
    memmove((void *)descriptor->target, (const void *)descriptor->source, descriptor->size);
    if (!(bl_dsa_flags(descriptor) & BL_DSA_CC))
        bl_flush((const void *)descriptor->target, descriptor->size);
    run->done = descriptor->size;
}

static void bl_dsa_run_flush(bl_dsa_run *run)
{
    const bl_dsa_descriptor *descriptor = run->descriptor;
    if (bl_dsa_flags(descriptor) & BL_DSA_CC) {
        bl_flush((const void *)descriptor->target, run->size);
        bl_fence();
    } else {
        bl_drop((const void *)descriptor->target, run->size);
    }
    run->done = run->size;
}

static int bl_dsa_run_all(void *context)
{
    bl_dsa_run *run = context;
    const bl_dsa_descriptor *descriptor = run->descriptor;
    uint32_t opcode = bl_dsa_opcode(descriptor);
    if (opcode == BL_DSA_NOOP)
        return 0;
    run->crc = bl_dsa_flags(descriptor) & BL_DSA_SEED_READ
                   ? *(const uint32_t *)descriptor->seed_address
                   : descriptor->seed;
    if (opcode == BL_DSA_CFLUSH) {
        bl_dsa_run_flush(run);
        return 0;
    }
    if (opcode == BL_DSA_MEMMOVE &&
        bl_dsa_overlap(descriptor->source, descriptor->target, descriptor->size)) {
        bl_dsa_run_move(run);
        return 0;
    }
    while (run->done < run->size) {
        uint32_t ragged = (uint32_t)(descriptor->target + run->done) % BL_LINE_SIZE;
        uint32_t room = BL_DSA_STAGE_SIZE - ragged, left = run->size - run->done;
        if (bl_dsa_run_step(run, left < room ? left : room))
            return 0;
    }
    return 0;
}

/* Return the fault_address of a fault after run->done bytes. */
static uint64_t bl_dsa_fault_address(const bl_dsa_run *run, uint32_t is_write)
{
    const bl_dsa_descriptor *descriptor = run->descriptor;
    return (is_write ? descriptor->target : descriptor->source) + run->done;
}

static void bl_dsa_stopped(bl_dsa_record *record, uint64_t address, uint32_t is_write)
{
    record->status = BL_DSA_PAGE_FAULT | (is_write ? BL_DSA_STATUS_WRITE : 0);
    record->fault_address = address;
}

/* Record that a device of the pool has failed: the address, and whether the access was a write. */
static void bl_dsa_broken(const bl_memory *memory, const bl_dsa_run *run, bl_dsa_record *record)
{
    uint64_t offset = bl_guard_offset(memory);
    uint64_t address = offset < memory->size ? (uintptr_t)bl_guard_address()
                                             : bl_dsa_fault_address(run, 0);
    uint32_t size = run->descriptor->size;
    bl_dsa_stopped(record, address,
                   bl_dsa_traits[bl_dsa_opcode(run->descriptor)].targets > 0 &&
                       address - run->descriptor->target < size);
}

void bl_dsa_execute(const bl_dsa_setting *setting, const bl_dsa_descriptor *descriptor,
                    const bl_dsa_injected *injected, bl_dsa_record *record)
{
    *record = (bl_dsa_record){0};
    uint32_t why = bl_dsa_refusal(setting, descriptor, record);
    if (why == BL_DSA_NONE && injected != NULL && injected->kind == BL_DSA_INJECT_ERROR)
        why = BL_DSA_HW_ERR1;
    if (why != BL_DSA_NONE) {
        record->status = (uint8_t)why;
        return;
    }
    const bl_dsa_trait *trait = &bl_dsa_traits[bl_dsa_opcode(descriptor)];
    bl_dsa_run run = {.descriptor = descriptor, .size = trait->moves ? descriptor->size : 0};
    int faults = injected != NULL && injected->kind == BL_DSA_INJECT_FAULT &&
                 injected->at < run.size;
    if (faults)
        run.size = injected->at;
    int status = setting->pool ? bl_guarded(&setting->pool->memory, bl_dsa_run_all, &run)
                               : bl_dsa_run_all(&run);
    record->completed = run.done;
    if (status < 0) {
        bl_dsa_broken(&setting->pool->memory, &run, record);
    } else if (faults && run.done == run.size) {
        uint32_t is_write = trait->targets > 0 && (trait->sources == 0 || injected->is_write);
        bl_dsa_stopped(record, bl_dsa_fault_address(&run, is_write), is_write);
    } else {
        record->status = BL_DSA_SUCCESS;
    }
    if (trait->specific == 16)
        record->crc = run.crc;
    if (bl_dsa_opcode(descriptor) == BL_DSA_COMPARE) {
        record->result = (uint8_t)run.differ;
        if (record->status == BL_DSA_SUCCESS && (bl_dsa_flags(descriptor) & BL_DSA_CR) &&
            run.differ != descriptor->expected)
            record->status = BL_DSA_SUCCESS_PRED;
    }
}
