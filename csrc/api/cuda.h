/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * GPUs (cuda/driver.c), the windows in which a pool is registered with one (cuda/windows.c), and
 * the engine that copies between its memory and the pool (cuda/engine.c). The Python half is
 * beluga/transfer/cuda. Streams, events and addresses of a GPU are numbers, as in CUDA.
 *
 * Functions return a negative errno or bl_error, or a failed call's CUresult r as -(BL_CUDA_STATUS
 * + r).
 */
#ifndef BL_API_CUDA_H
#define BL_API_CUDA_H

#include "api/transfer.h"

enum bl_cuda_number {
    BL_CUDA_STATUS = 10000,
    BL_CUDA_KERNELS = 8         /* gather, scatter; of whole or half warps; without sums or with */
};

/* A GPU, by its primary context, as torch and cupy use it. It exists until the process ends. Every
 * call restores the context that was current in its thread, and may be made while another thread
 * captures a graph. */
typedef struct bl_cuda bl_cuda;

typedef struct bl_cuda_facts {
    char name[128];
    char bus[32];               /* PCI address */
    int32_t major, minor;       /* compute capability */
    int32_t version;            /* of CUDA, by the driver: 12080 is 12.8 */
} bl_cuda_facts;

/* Open the GPU of this number by the driver's library. Returns 0 or a negative number; fault then
 * has the reason. */
int bl_cuda_open(const char *library, uint32_t number, char *fault, uint64_t fault_size,
                 bl_cuda **out);

/* Load the kernels from a cubin. */
int bl_cuda_load(bl_cuda *cuda, const void *cubin);

const bl_cuda_facts *bl_cuda_facts_of(const bl_cuda *cuda);

/* Return the text of a function's negative result; NULL if it is of no CUDA call. */
const char *bl_cuda_text(const bl_cuda *cuda, int64_t status);

int bl_cuda_allocate(bl_cuda *cuda, uint64_t size, uint64_t *address);
int bl_cuda_free(bl_cuda *cuda, uint64_t address);
/* Pin new or existing memory of this process; the GPU reaches it at address. */
int bl_cuda_pin(bl_cuda *cuda, uint64_t size, void **host, uint64_t *address);
int bl_cuda_unpin(bl_cuda *cuda, void *host);
int bl_cuda_register(bl_cuda *cuda, void *host, uint64_t size, uint64_t *address);
int bl_cuda_unregister(bl_cuda *cuda, void *host);
int bl_cuda_memcpy(bl_cuda *cuda, uint64_t target, uint64_t source, uint64_t size, uint64_t stream);
/* Make a stream that waits for no other one; lower numbers are more urgent. */
int bl_cuda_stream(bl_cuda *cuda, int32_t priority, uint64_t *stream);
int bl_cuda_end_stream(bl_cuda *cuda, uint64_t stream);
int bl_cuda_capturing(bl_cuda *cuda, uint64_t stream, int32_t *status);
int bl_cuda_event(bl_cuda *cuda, uint64_t *event);
int bl_cuda_free_event(bl_cuda *cuda, uint64_t event);
int bl_cuda_record(bl_cuda *cuda, uint64_t event, uint64_t stream);
int bl_cuda_follow(bl_cuda *cuda, uint64_t stream, uint64_t event);
int bl_cuda_wait(bl_cuda *cuda, uint64_t event);
int bl_cuda_elapsed(bl_cuda *cuda, double *ms, uint64_t first, uint64_t last);
/* Return 1 if the work before the event has ended, and 0 if not. */
int bl_cuda_query(bl_cuda *cuda, uint64_t event);

/* The windows of a pool on one GPU, which all engines of this process share. A window is held by
 * the copies that use it, until their kernels have ended. */
typedef struct bl_cuda_windows bl_cuda_windows;

enum bl_cuda_window_state {
    BL_CUDA_WINDOW_NONE,        /* no data, or it cannot be registered */
    BL_CUDA_WINDOW_WAITING,     /* to be registered */
    BL_CUDA_WINDOW_READY,
    BL_CUDA_WINDOW_REFUSED      /* beyond the limit; it may replace another one */
};

typedef struct bl_cuda_window {
    uint64_t size;
    uint64_t base;              /* GPU address; 0: not registered */
    uint64_t used;              /* number of the last copy that used it */
    uint64_t missed;            /* bytes that were bounced because it was not registered */
    uint32_t holds;             /* copies */
    uint8_t state;
    uint8_t wanted;             /* copies need it */
} bl_cuda_window;

/* Make the table, [device_count][window_count]. sizes: bytes of each window, 0 without data. order:
 * windows in the order in which they are registered if no copy needs one. */
int bl_cuda_windows_open(uint32_t device_count, uint32_t window_count, uint32_t window_shift,
                         const uint64_t *sizes, const uint32_t *order, uint32_t order_count,
                         bl_cuda_windows **out);
void bl_cuda_windows_free(bl_cuda_windows *windows);
const bl_cuda_window *bl_cuda_windows_at(const bl_cuda_windows *windows, uint32_t index);
/* Return the GPU addresses, by window. */
const uint64_t *bl_cuda_windows_bases(const bl_cuda_windows *windows);

/* Wait for a window to register, and return its index; requested is 1 if copies need it. Returns
 * -ECANCELED once bl_cuda_windows_stop was called. One thread calls this. */
int64_t bl_cuda_windows_next(bl_cuda_windows *windows, uint32_t *requested);
void bl_cuda_windows_set(bl_cuda_windows *windows, uint32_t index, uint32_t state, uint64_t base);
/* Refuse all windows that wait. */
void bl_cuda_windows_fill_no_more(bl_cuda_windows *windows);
/* Take the least recently used window that no copy holds. Returns its index, or -EBUSY. The caller
 * then unregisters it. */
int64_t bl_cuda_windows_retire(bl_cuda_windows *windows);
/* Wait until there is nothing to register. Returns 0 or -ETIMEDOUT. */
int bl_cuda_windows_settle(bl_cuda_windows *windows, uint64_t timeout_ns);
void bl_cuda_windows_stop(bl_cuda_windows *windows);

typedef struct bl_cuda_engine bl_cuda_engine;
typedef struct bl_cuda_copy bl_cuda_copy;

enum bl_cuda_limit {
    BL_CUDA_THREADS = 512       /* of a block; 8 words of 16 bytes each are in flight: 64 KiB */
};

typedef struct bl_cuda_settings {
    uint64_t stream;            /* UINT64_MAX: the engine's, one for each direction */
    uint64_t bounce_size;       /* bytes of bounce buffers */
    uint64_t range_size[2];     /* bytes of a launch: reads, writes */
    uint32_t blocks;            /* multiprocessors of a copy, twice as many with checksums */
    uint32_t before_read;       /* bl_maintenance */
    uint32_t after_write;
    uint32_t threads;           /* of the maintenance */
} bl_cuda_settings;

typedef struct bl_cuda_stat {
    uint64_t direct_bytes;
    uint64_t bounced_bytes;
    uint64_t bounced_copies;
    uint64_t launches;
    uint64_t buffers;           /* in use */
} bl_cuda_stat;

/* Open an engine. The pool, the GPU and the windows outlive it. */
int bl_cuda_engine_open(bl_cuda *cuda, bl_cuda_windows *windows, const bl_pool *pool,
                        const bl_cuda_settings *settings, bl_cuda_engine **out);
/* Wait for the kernels in flight, and free all buffers; unfinished copies get -ECANCELED. Returns
 * 0, or -EINPROGRESS if kernels may still run: then nothing is freed, ever. */
int bl_cuda_engine_close(bl_cuda_engine *engine);
/* Free an engine that is closed, after its last copy was dropped. */
void bl_cuda_engine_free(bl_cuda_engine *engine);
void bl_cuda_engine_stat(const bl_cuda_engine *engine, bl_cuda_stat *out);

/* Prepare a plan, whose arrays stay valid until the copy is dropped: its registered windows are
 * held. stream: UINT64_MAX means that of the settings. Returns 0; -EINVAL: the plan is invalid;
 * -EXDEV: a piece lies in two stripes; -EBUSY: the stream is being captured; -ESHUTDOWN;
 * -ENOMEM. */
int bl_cuda_prepare(bl_cuda_engine *engine, const bl_plan *plan, uint32_t write, uint64_t stream,
                    bl_cuda_copy **out);
/* Start some chunks, in parts, whose first and last number plus one are filled in; last: no other
 * range follows. After an error this range has no work in progress, unless it is -EINPROGRESS. */
int bl_cuda_start(bl_cuda_copy *copy, uint32_t first, uint32_t end, uint32_t last,
                  uint32_t *parts);
/* Return 1 if the parts from first to end have ended, and 0 if not. This does the CPU's part of the
 * work. */
int bl_cuda_done(bl_cuda_copy *copy, uint32_t first, uint32_t end);
/* Wait for the parts from first to end; timeout_ns UINT64_MAX: without a limit. Returns the number
 * of chunks whose checksum differs; -ETIMEDOUT; or the error of a part. If a call of CUDA failed,
 * the work may still run. */
int64_t bl_cuda_finish(bl_cuda_copy *copy, uint32_t first, uint32_t end, uint64_t timeout_ns);
/* Give up a copy. Its engine frees it when its kernels have ended. */
void bl_cuda_drop(bl_cuda_copy *copy);

/* Return the engine's table for callers in C; copies go to its stream. The caller sets the sizes of
 * pieces. */
bl_engine bl_cuda_engine_table(bl_cuda_engine *engine);

/* Put a copy of the whole plan into the graph that the stream is being captured into. Returns 0,
 * -EAGAIN if the plan's windows are not registered, -EBUSY if the stream is not being captured, or
 * the errors of bl_cuda_prepare. The copy exists until the engine is closed. */
int bl_cuda_capture(bl_cuda_engine *engine, const bl_plan *plan, uint32_t write, uint64_t stream,
                    bl_cuda_copy **out);
/* Do the CPU's part before a replay, and after one: returns as bl_cuda_finish. */
int bl_cuda_replay(bl_cuda_copy *copy);
int64_t bl_cuda_replayed(bl_cuda_copy *copy);

#endif
