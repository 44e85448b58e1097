/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * One work of the DSA engine (dsa/group.h): its descriptors and the results of these.
 *
 * Completion records are foreign input: byte counts are bounded by the size of the descriptor, and
 * a fault address is accepted only inside the descriptor's ranges. madvise() maps the page; a store
 * to it would not do, since the device may be writing next to the faulting byte.
 */
#include "dsa/group.h"

#ifndef BL_SIM

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "coherence/coherence.h"
#include "transfer/device_range.h"
#include "dsa/execute.h"
#include "coherence/guard.h"

static uint32_t bl_dsa_least(uint64_t a, uint64_t b) { return (uint32_t)(a < b ? a : b); }

typedef struct bl_dsa_range {
    const bl_memory *memory;
    uint64_t offset;
    uint64_t size;
} bl_dsa_range;

static int bl_dsa_reads_guarded(void *context)
{
    const bl_dsa_range *range = context;
    bl_device_reads(range->memory, range->offset, range->size);
    return 0;
}

static int bl_dsa_written_guarded(void *context)
{
    const bl_dsa_range *range = context;
    bl_device_written(range->memory, range->offset, range->size);
    return 0;
}

static int bl_dsa_bounces(const bl_dsa_transfer *transfer)
{
    return transfer->is_read && transfer->by_chunk && transfer->plan.sparse;
}

int bl_dsa_work_begin(bl_dsa_engine *engine, bl_dsa_transfer *transfer, bl_dsa_work *work)
{
    const bl_plan *plan = &transfer->plan;
    uint32_t index = transfer->begun++;
    *work = (bl_dsa_work){.transfer = transfer};
    if (transfer->by_chunk) {
        const bl_chunk *chunk = &plan->chunks[index];
        work->chunk = index;
        work->offset = chunk->offset, work->length = chunk->length;
        work->piece = chunk->first - plan->piece_base;
        work->piece_end = index + 1 < plan->chunk_count ? chunk[1].first - plan->piece_base
                                                        : plan->piece_count;
    } else {
        const bl_piece *piece = &plan->pieces[index];
        work->chunk = piece->chunk - plan->chunk_base;
        work->offset = piece->offset, work->length = piece->length;
        work->piece = index, work->piece_end = index + 1;
    }
    transfer->open++;
    if (bl_dsa_bounces(transfer)) {
        work->bounce = aligned_alloc(BL_LINE_SIZE, (work->length + 63ull) & ~63ull);
        if (work->bounce == NULL)
            return -ENOMEM;
        engine->bounced += work->length;
    }
    bl_dsa_range range = {engine->memory, work->offset, work->length};
    if (transfer->is_read && engine->rules.before_read == BL_DSA_FLUSH_CPU)
        return bl_guarded(engine->memory, bl_dsa_reads_guarded, &range);
    return 0;
}

/* Return the bytes from the end of the block to the end of its last line, if this work is its
 * last. */
static uint32_t bl_dsa_work_blank(const bl_dsa_work *work)
{
    const bl_plan *plan = &work->transfer->plan;
    const bl_chunk *chunk = &plan->chunks[work->chunk];
    uint64_t end = work->offset + work->length;
    int ends_chunk = end == chunk->offset + chunk->length;
    int ends_block = work->chunk + 1 == plan->chunk_count || chunk[1].offset != end;
    return ends_chunk && ends_block ? (uint32_t)(-end % BL_LINE_SIZE) : 0;
}

static uint32_t bl_dsa_step_size(const bl_dsa_engine *engine, const bl_dsa_work *work)
{
    const bl_dsa_transfer *transfer = work->transfer;
    const bl_dsa_rules *rules = &engine->rules;
    switch (work->step) {
    case BL_DSA_STEP_DROP:
        return transfer->is_read && rules->before_read == BL_DSA_FLUSH_DEVICE ? work->length : 0;
    case BL_DSA_STEP_BOUNCE:
        return bl_dsa_bounces(transfer) ? work->length : 0;
    case BL_DSA_STEP_BLANK:
        return transfer->is_read ? 0 : bl_dsa_work_blank(work);
    default:
        return !transfer->is_read && rules->after_write == BL_DSA_FLUSH_DEVICE ? work->length : 0;
    }
}

/* Advance to the next unfinished piece. Returns its size, or 0 if there is none. */
static uint32_t bl_dsa_piece_size(bl_dsa_work *work)
{
    const bl_piece *pieces = work->transfer->plan.pieces;
    for (; work->piece < work->piece_end; work->piece++, work->done = 0)
        if (work->done < pieces[work->piece].length)
            return pieces[work->piece].length;
    return 0;
}

/* Advance to the next unfinished step or piece. Returns its remaining bytes, or 0 if the work is
 * done. */
static uint32_t bl_dsa_work_advance(const bl_dsa_engine *engine, bl_dsa_work *work)
{
    for (; work->step < BL_DSA_STEP_END; work->step++, work->done = 0) {
        uint32_t size = 0;
        if (work->step != BL_DSA_STEP_COPY)
            size = bl_dsa_step_size(engine, work);
        else if (!bl_dsa_bounces(work->transfer))
            size = bl_dsa_piece_size(work);
        if (work->done < size)
            return size - work->done;
    }
    return 0;
}

/* Return the address of the range's next byte, and limit *size to the bytes that are contiguous
 * there. */
static uint64_t bl_dsa_range_run(const bl_dsa_engine *engine, const bl_dsa_work *work,
                                 uint64_t start, uint32_t *size)
{
    uint64_t offset = start + work->done;
    *size = bl_dsa_least(*size, bl_stripe_rest(offset));
    return (uintptr_t)bl_address(engine->memory, offset);
}

int bl_dsa_work_next(const bl_dsa_engine *engine, bl_dsa_work *work, bl_dsa_descriptor *out)
{
    const bl_dsa_transfer *transfer = work->transfer;
    uint32_t size = bl_dsa_work_advance(engine, work), opcode, flags = BL_DSA_CRAV | BL_DSA_RCR;
    uint32_t copy = transfer->by_chunk ? BL_DSA_COPY_CRC : BL_DSA_MEMMOVE;
    if (size == 0)
        return 0;
    size = bl_dsa_least(size, engine->limits.size_max);
    *out = (bl_dsa_descriptor){0};
    switch (work->step) {
    case BL_DSA_STEP_COPY: {
        const bl_piece *piece = &transfer->plan.pieces[work->piece];
        uint64_t memory = piece->address + work->done;
        uint64_t pool = bl_dsa_range_run(engine, work, piece->offset, &size);
        opcode = copy; /* allocates in this host's cache: this host uses the bytes next */
        flags |= transfer->is_read || engine->rules.write_to_cache ? BL_DSA_CC : 0;
        out->source = transfer->is_read ? pool : memory;
        out->target = transfer->is_read ? memory : pool;
        break;
    }
    case BL_DSA_STEP_BOUNCE:
        opcode = copy, flags |= BL_DSA_CC;
        out->source = bl_dsa_range_run(engine, work, work->offset, &size);
        out->target = (uintptr_t)work->bounce + work->done;
        break;
    case BL_DSA_STEP_BLANK:
        opcode = BL_DSA_FILL, flags |= engine->rules.write_to_cache ? BL_DSA_CC : 0;
        out->target = bl_dsa_range_run(engine, work, work->offset + work->length, &size);
        break;
    default:
        opcode = BL_DSA_CFLUSH;
        out->target = bl_dsa_range_run(engine, work, work->offset, &size);
    }
    if (opcode == BL_DSA_COPY_CRC)
        out->seed = work->crc;
    out->flags_opcode = flags | opcode << 24;
    out->size = work->submitted = size;
    return 1;
}

/* Have the kernel map the missing page. Returns 0, an error, or 1 if the kernel cannot do that. */
static int bl_dsa_map_page(const bl_dsa_engine *engine, const bl_dsa_descriptor *descriptor,
                       const bl_dsa_record *record)
{
    enum { POPULATE_READ = 22, POPULATE_WRITE = 23 }; /* MADV_..., Linux 5.14 */
    uint32_t is_write = record->status & BL_DSA_STATUS_WRITE, opcode = bl_dsa_opcode(descriptor);
    int has_source = opcode == BL_DSA_MEMMOVE || opcode == BL_DSA_COPY_CRC;
    uint64_t start = is_write || !has_source ? descriptor->target : descriptor->source;
    uint64_t page = record->fault_address & ~(uint64_t)(BL_PAGE_SIZE - 1);
    if (page + BL_PAGE_SIZE <= start || page >= start + descriptor->size)
        return 1;
    if (madvise((void *)page, BL_PAGE_SIZE, is_write ? POPULATE_WRITE : POPULATE_READ) == 0)
        return 0;
    if (errno == EINVAL || errno == ENOSYS || errno == EPERM)
        return 1;
    const bl_interleave *map = &engine->memory->map;
    for (uint32_t i = 0; i < map->device_count; i++)
        if (page - (uintptr_t)engine->memory->base[i] < bl_device_size(map, i))
            return bl_fault_judge(engine->memory, (const void *)page);
    return -EFAULT;
}

static void bl_dsa_work_gain(bl_dsa_work *work, const bl_dsa_descriptor *descriptor,
                             const bl_dsa_record *record, uint32_t bytes)
{
    work->done += bytes;
    if (bytes > 0) {
        work->stalls = 0;
        if (bl_dsa_opcode(descriptor) == BL_DSA_COPY_CRC)
            work->crc = (uint32_t)record->crc;
    }
}

typedef struct bl_dsa_on_cpu {
    bl_dsa_setting setting;
    bl_dsa_descriptor descriptor;
    bl_dsa_record record;
} bl_dsa_on_cpu;

static int bl_dsa_on_cpu_guarded(void *context)
{
    bl_dsa_on_cpu *worker = context;
    bl_dsa_execute(&worker->setting, &worker->descriptor, NULL, &worker->record);
    return 0;
}

/* Execute the work's next descriptor on the CPU. */
static int bl_dsa_work_on_cpu(bl_dsa_engine *engine, bl_dsa_work *work)
{
    bl_dsa_on_cpu worker = {.setting = {&engine->limits, NULL, 0}};
    if (!bl_dsa_work_next(engine, work, &worker.descriptor))
        return 0;
    int status = bl_guarded(engine->memory, bl_dsa_on_cpu_guarded, &worker);
    if (status < 0)
        return status;
    engine->stat.by_cpu++;
    if (worker.record.status != BL_DSA_SUCCESS)
        return -EIO;
    bl_dsa_work_gain(work, &worker.descriptor, &worker.record, worker.descriptor.size);
    return 0;
}

int bl_dsa_work_handle(bl_dsa_engine *engine, bl_dsa_work *work,
                       const bl_dsa_descriptor *descriptor, const bl_dsa_record *record)
{
    uint32_t status = record->status & BL_DSA_STATUS_MASK;
    if (status == BL_DSA_SUCCESS) {
        bl_dsa_work_gain(work, descriptor, record, work->submitted);
        return 0;
    }
    if (status == BL_DSA_NONE || status == BL_DSA_PAGE_FAULT) {
        int mended = 0;
        if (status == BL_DSA_PAGE_FAULT) {
            uint32_t bytes = bl_dsa_least(record->completed, work->submitted);
            bl_dsa_work_gain(work, descriptor, record, bytes);
            engine->stat.faults++;
            mended = bl_dsa_map_page(engine, descriptor, record);
        }
        if (mended < 0)
            return mended;
        if (mended == 0 && ++work->stalls < BL_DSA_STALLS_MAX)
            return 0;
    }
    return bl_dsa_work_on_cpu(engine, work);
}

static void bl_dsa_work_leave(bl_dsa_engine *engine, bl_dsa_work *work)
{
    if (work->bounce != NULL) {
        engine->bounced -= work->length;
        free(work->bounce);
    }
    work->transfer->open--;
    *work = (bl_dsa_work){0};
}

void bl_dsa_work_drop(bl_dsa_engine *engine, bl_dsa_work *work) { bl_dsa_work_leave(engine, work); }

static int bl_dsa_work_judge(const bl_dsa_engine *engine, bl_dsa_work *work)
{
    bl_plan *plan = &work->transfer->plan;
    if (!work->transfer->is_read) {
        if (plan->checksums != NULL)
            plan->checksums[work->chunk] = work->crc;
        bl_dsa_range range = {engine->memory, work->offset, work->length};
        if (engine->rules.after_write == BL_DSA_FLUSH_CPU)
            return bl_guarded(engine->memory, bl_dsa_written_guarded, &range);
        return 0;
    }
    if (plan->checksums != NULL && work->crc != plan->checksums[work->chunk])
        return -EBADMSG;
    if (work->bounce != NULL)
        for (; work->piece < work->piece_end; work->piece++) {
            const bl_piece *piece = &plan->pieces[work->piece];
            memcpy((void *)piece->address, work->bounce + (piece->offset - work->offset),
                   piece->length);
        }
    return 0;
}

int bl_dsa_work_end(bl_dsa_engine *engine, bl_dsa_work *work)
{
    int status = bl_dsa_work_judge(engine, work);
    bl_dsa_work_leave(engine, work);
    return status;
}

#endif
