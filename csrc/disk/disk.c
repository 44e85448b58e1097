/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The I/O of the disk tier (api/disk.h). A call cuts its requests into pieces, at most depth of
 * which are in flight: adjacent requests are merged, and a long write is split. Checksums and
 * copies are computed while other pieces are in flight.
 *
 * Reads have priority. The gate admits writes depending on recent reads:
 *
 *   a read in flight, or at most 20 ms ago   one piece of 128 KiB, at most one each 4 ms
 *   a read at most a second ago              pieces of 256 KiB, at most 512 KiB in flight
 *   none                                     pieces of 4 MiB, depth of them in flight
 *
 * So a read has a short wait, however many writes are queued, and writes do not starve.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "api/disk.h"
#include "base/minmax.h"
#include "base/thread.h"
#include "api/coherence.h"
#include "disk/uring.h"

enum {
    BL_DISK_DEPTH_MAX = 256,
    BL_DISK_RINGS_KEPT = 16,
    BL_DISK_ENDED_MAX = 2 * BL_DISK_DEPTH_MAX,  /* pieces in flight or not checked yet */
    BL_DISK_MERGE = 2 << 20,            /* the most bytes of a merged piece */
    BL_DISK_SMALL = 128 << 10,
    BL_DISK_MEDIUM = 256 << 10,
    BL_DISK_LARGE = 4 << 20
};

static const uint64_t BL_DISK_BUSY_NS = 20000000, BL_DISK_RECENT_NS = 1000000000;
static const uint64_t BL_DISK_GAP_NS = 4000000, BL_DISK_SYNC_NS = 50000000;

typedef struct bl_disk_call bl_disk_call;

/* One I/O: several adjacent requests of a call, or a part of one. */
typedef struct bl_disk_piece {
    bl_disk_call *call;
    uint64_t offset;
    uint8_t *bytes;
    uint32_t size;
    uint32_t done;              /* bytes moved */
    uint32_t first, end;        /* the requests that it overlaps */
} bl_disk_piece;

struct bl_disk_call {
    bl_disk_call *next;         /* in the queue of the threads */
    bl_disk_request *requests;
    uint32_t count;
    uint32_t at, inside;        /* where the next piece begins: request, and offset inside it */
    uint32_t open;              /* pieces in flight */
    int write;
};

struct bl_disk {
    pthread_mutex_t lock;
    pthread_cond_t changed;     /* a call has ended, or the gate admits more */
    pthread_cond_t work;        /* there is work for the threads */
    int file;
    uint32_t engine;
    uint32_t depth;
    uint64_t reads;             /* read calls in progress */
    uint64_t last_read_ns;      /* when the last one ended */
    uint64_t last_write_ns;     /* when the last piece was admitted */
    uint64_t write_bytes;       /* in flight */
    bl_uring *rings[BL_DISK_RINGS_KEPT];
    uint32_t ring_count;
    bl_disk_call *calls[2];     /* queued for the threads: reads, writes */
    pthread_t *threads;
    uint32_t thread_count;
    uint32_t moving;            /* pieces that threads are reading or writing */
    uint32_t ended_first, ended_count; /* read; checksums not checked yet */
    bl_disk_piece ended[BL_DISK_ENDED_MAX];
    int gate_watched;           /* 1: a thread waits for the gate */
    int stop;
};

static uint64_t bl_disk_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* ---- The gate. The caller holds the lock. */

/* Return the time since the last read ended; 0 during a read. */
static uint64_t bl_gate_quiet(const bl_disk *disk)
{
    return disk->reads ? 0 : bl_disk_now() - disk->last_read_ns;
}

/* Return how many bytes of a write may start now; 0: try again after *wait_ns, or at the next
 * change. */
static uint32_t bl_gate_admit(const bl_disk *disk, uint64_t *wait_ns)
{
    uint64_t quiet = bl_gate_quiet(disk);
    *wait_ns = BL_DISK_GAP_NS;
    if (quiet < BL_DISK_BUSY_NS) {
        uint64_t since = bl_disk_now() - disk->last_write_ns;
        if (since < BL_DISK_GAP_NS)
            *wait_ns = BL_DISK_GAP_NS - since;
        return disk->write_bytes == 0 && since >= BL_DISK_GAP_NS ? BL_DISK_SMALL : 0;
    }
    if (quiet < BL_DISK_RECENT_NS)
        return disk->write_bytes < 2 * BL_DISK_MEDIUM ? BL_DISK_MEDIUM : 0;
    return disk->write_bytes < (uint64_t)disk->depth * BL_DISK_LARGE ? BL_DISK_LARGE : 0;
}

static void bl_gate_enter(bl_disk *disk, uint32_t size)
{
    disk->write_bytes += size;
    disk->last_write_ns = bl_disk_now();
}

static void bl_gate_leave(bl_disk *disk, uint32_t size)
{
    disk->write_bytes -= size;
    pthread_cond_broadcast(&disk->changed);
    pthread_cond_signal(&disk->work);
}

static void bl_disk_wait(bl_disk *disk, pthread_cond_t *event, uint64_t ns)
{
    uint64_t until = bl_disk_now() + ns;
    struct timespec time = {(time_t)(until / 1000000000), (long)(until % 1000000000)};
    pthread_cond_timedwait(event, &disk->lock, &time);
}

/* ---- Pieces */

static int bl_disk_call_has_more(const bl_disk_call *call) { return call->at < call->count; }

/* Cut the next piece, of at most limit bytes; a read piece has whole requests, at least one. */
static bl_disk_piece bl_disk_call_cut(bl_disk_call *call, uint32_t limit)
{
    const bl_disk_request *request = &call->requests[call->at];
    bl_disk_piece piece = {.call = call, .offset = request->offset + call->inside,
                           .bytes = request->bytes + call->inside,
                           .first = call->at, .end = call->at};
    while (call->at < call->count) {
        request = &call->requests[call->at];
        uint32_t rest = request->size - call->inside, room = limit - piece.size;
        if (piece.size && (request->offset != piece.offset + piece.size ||
                           request->bytes != piece.bytes + piece.size))
            break;
        if (rest > room && (!call->write || room == 0) && piece.size)
            break;
        uint32_t part = call->write ? (uint32_t)bl_min(rest, room) : rest;
        piece.size += part;
        piece.end = call->at + 1;
        call->inside += part;
        if (call->inside < request->size)
            break;
        call->at++;
        call->inside = 0;
        if (piece.size >= limit)
            break;
    }
    return piece;
}

/* Set the results of the piece's incomplete requests. result is that of the last system call. */
static void bl_disk_piece_end(bl_disk_call *call, const bl_disk_piece *piece, int64_t result)
{
    int32_t status = piece->done == piece->size ? 0 : result < 0 ? (int32_t)result : -ENODATA;
    for (uint32_t i = piece->first; i < piece->end && status; i++) {
        bl_disk_request *request = &call->requests[i];
        if (!request->result && request->offset + request->size > piece->offset + piece->done)
            request->result = status;
    }
}

/* Copy the bytes that a piece writes from their sources. */
static void bl_disk_piece_copy(const bl_disk_call *call, const bl_disk_piece *piece)
{
    for (uint32_t i = piece->first; i < piece->end && call->write; i++) {
        bl_disk_request *request = &call->requests[i];
        uint64_t from = i == piece->first ? piece->offset - request->offset : 0;
        uint64_t end = bl_min(piece->offset + piece->size - request->offset, request->size);
        if (!request->source || request->source == request->bytes)
            continue;
        uint64_t copied = request->length < from ? from : bl_min(request->length, end);
        memcpy(request->bytes + from, request->source + from, copied - from);
        memset(request->bytes + copied, 0, end - copied);
    }
}

/* Compute the checksums of the requests that begin in a piece. */
static void bl_disk_piece_sum(const bl_disk_call *call, const bl_disk_piece *piece)
{
    for (uint32_t i = piece->first; i < piece->end && call->write; i++) {
        bl_disk_request *request = &call->requests[i];
        if (request->source && request->offset >= piece->offset)
            request->crc = bl_crc32c(request->seed, request->source, request->length);
    }
}

/* Check the checksums of a piece that was read. */
static void bl_disk_piece_check(const bl_disk_call *call, const bl_disk_piece *piece)
{
    for (uint32_t i = piece->first; i < piece->end && !call->write; i++) {
        bl_disk_request *request = &call->requests[i];
        if (!request->result && request->length &&
            bl_crc32c(request->seed, request->bytes, request->length) != request->crc)
            request->result = -EBADMSG;
    }
}

/* Add the bytes of a system call. Returns 1 if the piece is incomplete and continues from there. */
static int bl_disk_piece_moved(bl_disk_piece *piece, int64_t result)
{
    if (result == -EINTR || result == -EAGAIN)
        return 1;
    if (result <= 0)
        return 0;
    piece->done += (uint32_t)result;
    return piece->done < piece->size && piece->done % BL_STORE_SECTOR_SIZE == 0;
}

/* ---- The threads */

static int64_t bl_disk_piece_move(int file, int write, bl_disk_piece *piece)
{
    int64_t result;
    do {
        struct iovec part = {piece->bytes + piece->done, piece->size - piece->done};
        off_t offset = (off_t)(piece->offset + piece->done);
        result = write ? pwritev(file, &part, 1, offset) : preadv(file, &part, 1, offset);
        if (result < 0)
            result = -errno;
    } while (bl_disk_piece_moved(piece, result));
    return result;
}

/* Choose the call whose next piece may start, reads first; NULL: none. A nonzero *wait_ns is the
 * time after which the gate may admit one. */
static bl_disk_call *bl_disk_choose(bl_disk *disk, uint32_t *limit, uint64_t *wait_ns)
{
    *wait_ns = 0;
    if (disk->moving >= disk->depth)
        return NULL;
    *limit = BL_DISK_MERGE;
    if (disk->calls[0])
        return disk->calls[0];
    if (!disk->calls[1])
        return NULL;
    *limit = bl_gate_admit(disk, wait_ns);
    return *limit ? disk->calls[1] : NULL;
}

/* Complete a piece; the last one wakes the caller. */
static void bl_disk_close_piece(bl_disk *disk, bl_disk_call *call)
{
    call->open--;
    if (!call->open && !bl_disk_call_has_more(call))
        pthread_cond_broadcast(&disk->changed);
}

/* Check the checksums of a piece that was read, without the lock. */
static void bl_disk_check(bl_disk *disk, bl_disk_piece piece)
{
    pthread_mutex_unlock(&disk->lock);
    bl_disk_piece_check(piece.call, &piece);
    pthread_mutex_lock(&disk->lock);
    bl_disk_close_piece(disk, piece.call);
}

static void bl_disk_check_first(bl_disk *disk)
{
    bl_disk_piece piece = disk->ended[disk->ended_first];
    disk->ended_first = (disk->ended_first + 1) % BL_DISK_ENDED_MAX;
    disk->ended_count--;
    bl_disk_check(disk, piece);
}

/* Queue a piece for its checksums, for a thread without I/O to do. */
static void bl_disk_check_later(bl_disk *disk, bl_disk_piece piece)
{
    if (disk->ended_count == BL_DISK_ENDED_MAX) {
        bl_disk_check(disk, piece);
        return;
    }
    disk->ended[(disk->ended_first + disk->ended_count) % BL_DISK_ENDED_MAX] = piece;
    disk->ended_count++;
    pthread_cond_signal(&disk->work);
}

/* Read or write one piece of a call, without the lock. */
static void bl_disk_step(bl_disk *disk, bl_disk_call *call, uint32_t limit)
{
    bl_disk_piece piece = bl_disk_call_cut(call, limit);
    if (!bl_disk_call_has_more(call))
        disk->calls[call->write] = call->next;
    call->open++;
    disk->moving++;
    if (call->write)
        bl_gate_enter(disk, piece.size);
    if (disk->moving < disk->depth && (disk->calls[0] || disk->calls[1]))
        pthread_cond_signal(&disk->work);       /* each thread wakes the next one */
    pthread_mutex_unlock(&disk->lock);
    bl_disk_piece_copy(call, &piece);
    bl_disk_piece_sum(call, &piece);
    int64_t result = bl_disk_piece_move(disk->file, call->write, &piece);
    pthread_mutex_lock(&disk->lock);
    disk->moving--;
    bl_disk_piece_end(call, &piece, result);
    if (call->write) {
        bl_gate_leave(disk, piece.size);
        bl_disk_close_piece(disk, call);
    } else {
        bl_disk_check_later(disk, piece);
    }
}

/* Wait for work. At most one thread waits with the gate's timeout. */
static void bl_disk_rest(bl_disk *disk, uint64_t gate_ns)
{
    if (!gate_ns || disk->gate_watched) {
        pthread_cond_wait(&disk->work, &disk->lock);
        return;
    }
    disk->gate_watched = 1;
    bl_disk_wait(disk, &disk->work, gate_ns);
    disk->gate_watched = 0;
}

/* Worker loop. I/O first, so that the disk is never idle; checksums only when no I/O can be
 * issued. */
static void *bl_disk_thread(void *context)
{
    bl_disk *disk = context;
    pthread_mutex_lock(&disk->lock);
    while (!disk->stop) {
        uint32_t limit;
        uint64_t gate_ns;
        bl_disk_call *call = bl_disk_choose(disk, &limit, &gate_ns);
        if (call)
            bl_disk_step(disk, call, limit);
        else if (disk->ended_count)
            bl_disk_check_first(disk);
        else
            bl_disk_rest(disk, gate_ns);
    }
    pthread_mutex_unlock(&disk->lock);
    return NULL;
}

/* Run a call on the threads; the caller holds the lock. */
static void bl_disk_run_threads(bl_disk *disk, bl_disk_call *call)
{
    bl_disk_call **end = &disk->calls[call->write];
    while (*end)
        end = &(*end)->next;
    *end = call;
    pthread_cond_signal(&disk->work);
    while (call->open || bl_disk_call_has_more(call))
        pthread_cond_wait(&disk->changed, &disk->lock);
}

/* ---- io_uring: the calling thread submits its pieces to its own ring. Many pieces may complete at
 * once; while their checksums are checked, as many others are in flight, so a call has slots for
 * twice depth. */

typedef struct bl_ring_run {
    bl_disk *disk;
    bl_disk_call *call;
    bl_uring *ring;
    bl_disk_piece pieces[BL_DISK_ENDED_MAX];
    uint32_t free[BL_DISK_ENDED_MAX];
    uint32_t free_count;
    uint32_t ended[BL_DISK_ENDED_MAX]; /* read; checksums not checked yet */
    uint32_t ended_count;
} bl_ring_run;

static void bl_ring_push(const bl_ring_run *run, uint32_t number)
{
    const bl_disk_piece *piece = &run->pieces[number];
    bl_uring_push(run->ring, run->disk->file, run->call->write, piece->offset + piece->done,
                  piece->bytes + piece->done, piece->size - piece->done, number);
}

/* Return how many bytes of the next piece may start; with block, wait until some may. */
static uint32_t bl_ring_limit(bl_disk *disk, const bl_disk_call *call, int block)
{
    if (!call->write)
        return BL_DISK_MERGE;
    uint64_t wait_ns;
    pthread_mutex_lock(&disk->lock);
    uint32_t limit = bl_gate_admit(disk, &wait_ns);
    while (!limit && block) {
        bl_disk_wait(disk, &disk->changed, wait_ns);
        limit = bl_gate_admit(disk, &wait_ns);
    }
    if (limit)
        bl_gate_enter(disk, limit);
    pthread_mutex_unlock(&disk->lock);
    return limit;
}

static void bl_ring_gate_leave(bl_disk *disk, uint32_t size)
{
    pthread_mutex_lock(&disk->lock);
    bl_gate_leave(disk, size);
    pthread_mutex_unlock(&disk->lock);
}

/* Submit as many pieces as may be in flight. Returns how many. */
static uint32_t bl_ring_fill(bl_ring_run *run)
{
    uint32_t count = 0;
    bl_disk_call *call = run->call;
    while (bl_disk_call_has_more(call) && call->open < run->disk->depth && run->free_count) {
        uint32_t limit = bl_ring_limit(run->disk, call, call->open == 0 && !run->ended_count);
        if (!limit)
            break;
        uint32_t number = run->free[--run->free_count];
        run->pieces[number] = bl_disk_call_cut(call, limit);
        if (call->write && run->pieces[number].size < limit)
            bl_ring_gate_leave(run->disk, limit - run->pieces[number].size);
        bl_disk_piece_copy(call, &run->pieces[number]);
        bl_ring_push(run, number);
        call->open++, count++;
        if (call->write) {      /* while the write is in flight */
            bl_uring_enter(run->ring, 0);
            bl_disk_piece_sum(call, &run->pieces[number]);
        }
    }
    return count;
}

/* Take completions; an incomplete piece is submitted again. */
static void bl_ring_drain(bl_ring_run *run)
{
    bl_uring_done done;
    while (bl_uring_reap(run->ring, &done)) {
        uint32_t number = (uint32_t)done.number;
        bl_disk_piece *piece = &run->pieces[number];
        if (bl_disk_piece_moved(piece, done.result)) {
            bl_ring_push(run, number);
            continue;
        }
        run->call->open--;
        bl_disk_piece_end(run->call, piece, done.result);
        if (run->call->write) {
            bl_ring_gate_leave(run->disk, piece->size);
            run->free[run->free_count++] = number;
        } else {
            run->ended[run->ended_count++] = number;
        }
    }
}

static void bl_ring_run_all(bl_ring_run *run)
{
    while (bl_disk_call_has_more(run->call) || run->call->open || run->ended_count) {
        bl_ring_fill(run);
        int rest = run->ended_count > 0;
        int rc = run->call->open ? bl_uring_enter(run->ring, !rest) : 0;
        if (rc == -EAGAIN || rc == -EBUSY)
            usleep(100);        /* the kernel is out of memory for the submission */
        while (run->ended_count) {
            uint32_t number = run->ended[--run->ended_count];
            bl_disk_piece_check(run->call, &run->pieces[number]);
            run->free[run->free_count++] = number;
        }
        bl_ring_drain(run);
    }
}

/* Take a ring from the pool of rings, or create one. Returns 0 or -errno. */
static int bl_disk_ring(bl_disk *disk, bl_uring **ring)
{
    pthread_mutex_lock(&disk->lock);
    *ring = disk->ring_count ? disk->rings[--disk->ring_count] : NULL;
    pthread_mutex_unlock(&disk->lock);
    return *ring ? 0 : bl_uring_create(ring, disk->depth);
}

static void bl_disk_ring_return(bl_disk *disk, bl_uring *ring)
{
    pthread_mutex_lock(&disk->lock);
    if (disk->ring_count < BL_DISK_RINGS_KEPT) {
        disk->rings[disk->ring_count++] = ring;
        ring = NULL;
    }
    pthread_mutex_unlock(&disk->lock);
    bl_uring_destroy(ring);
}

static int bl_disk_run_ring(bl_disk *disk, bl_disk_call *call)
{
    bl_ring_run *run = malloc(sizeof *run);
    if (!run)
        return -ENOMEM;
    run->disk = disk;
    run->call = call;
    run->ended_count = 0;
    int rc = bl_disk_ring(disk, &run->ring);
    if (rc) {
        free(run);
        return rc;
    }
    run->free_count = 2 * disk->depth;
    for (uint32_t i = 0; i < 2 * disk->depth; i++)
        run->free[i] = i;
    bl_ring_run_all(run);
    bl_disk_ring_return(disk, run->ring);
    free(run);
    return 0;
}

/* ---- Calls */

static int bl_disk_run(bl_disk *disk, bl_disk_call *call)
{
    int rc = 0;
    for (uint32_t i = 0; i < call->count; i++)
        call->requests[i].result = 0;
    if (call->count == 0)
        return 0;
    pthread_mutex_lock(&disk->lock);
    disk->reads += !call->write;
    if (disk->engine == BL_DISK_THREADS) {
        bl_disk_run_threads(disk, call);
    } else {
        pthread_mutex_unlock(&disk->lock);
        rc = bl_disk_run_ring(disk, call);
        pthread_mutex_lock(&disk->lock);
    }
    if (!call->write) {
        disk->reads--;
        disk->last_read_ns = bl_disk_now();
    }
    pthread_mutex_unlock(&disk->lock);
    return rc;
}

int bl_disk_read(bl_disk *disk, bl_disk_request *requests, uint32_t count)
{
    bl_disk_call call = {.requests = requests, .count = count};
    return bl_disk_run(disk, &call);
}

int bl_disk_write(bl_disk *disk, bl_disk_request *requests, uint32_t count)
{
    bl_disk_call call = {.requests = requests, .count = count, .write = 1};
    return bl_disk_run(disk, &call);
}

int bl_disk_sync(bl_disk *disk)
{
    int rc;
    uint64_t until = bl_disk_now() + BL_DISK_SYNC_NS;
    pthread_mutex_lock(&disk->lock);
    while (bl_gate_quiet(disk) < BL_DISK_BUSY_NS && bl_disk_now() < until)
        bl_disk_wait(disk, &disk->changed, BL_DISK_GAP_NS);
    pthread_mutex_unlock(&disk->lock);
    while ((rc = fdatasync(disk->file) < 0 ? -errno : 0) == -EINTR)
        ;
    return rc;
}

/* ---- Creation and destruction */

void bl_disk_destroy(bl_disk *disk)
{
    if (!disk)
        return;
    pthread_mutex_lock(&disk->lock);
    disk->stop = 1;
    pthread_cond_broadcast(&disk->work);
    pthread_mutex_unlock(&disk->lock);
    for (uint32_t i = 0; i < disk->thread_count; i++)
        pthread_join(disk->threads[i], NULL);
    for (uint32_t i = 0; i < disk->ring_count; i++)
        bl_uring_destroy(disk->rings[i]);
    free(disk->threads);
    pthread_cond_destroy(&disk->changed);
    pthread_cond_destroy(&disk->work);
    pthread_mutex_destroy(&disk->lock);
    free(disk);
}

int bl_disk_create(bl_disk **out, int file, uint32_t engine, uint32_t depth)
{
    if (depth == 0 || depth > BL_DISK_DEPTH_MAX || engine > BL_DISK_URING)
        return -EINVAL;
    bl_disk *disk = calloc(1, sizeof *disk);
    if (!disk)
        return -ENOMEM;
    *disk = (bl_disk){.file = file, .engine = engine, .depth = depth};
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&disk->changed, &attributes);
    pthread_cond_init(&disk->work, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&disk->lock, NULL);
    int rc = 0;
    if (engine == BL_DISK_URING)
        rc = bl_uring_create(&disk->rings[0], depth);
    disk->ring_count = engine == BL_DISK_URING && !rc;
    /* One thread more than pieces: it checks checksums while the others do I/O. */
    uint32_t threads = engine == BL_DISK_THREADS ? depth + 1 : 0;
    if (threads && !(disk->threads = calloc(threads, sizeof *disk->threads)))
        rc = -ENOMEM;
    while (!rc && disk->thread_count < threads)
        if (!(rc = bl_thread_start(&disk->threads[disk->thread_count], bl_disk_thread, disk)))
            disk->thread_count++;
    if (rc)
        bl_disk_destroy(disk);
    else
        *out = disk;
    return rc;
}
