/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The verbs of the simulator: hosts have private, incoherent caches, and any verb may switch to
 * another host. tests/sim/native has the bodies. Only coherence/coherence.h includes this file.
 */
#ifndef BL_COHERENCE_SIM_H
#define BL_COHERENCE_SIM_H

#include "coherence/copy.h"
#include "coherence/memory.h"

typedef struct bl_site {
    const char *file;
    const char *function;
    const char *verb;
    uint32_t line;
    uint32_t order;
} bl_site;

/* A static record for each use in the source; the linker collects them into a section. */
#define BL_SITE(name)                                                                              \
    (__extension__({                                                                               \
        static bl_site site_ __attribute__((section("bl_sites"), used, aligned(8))) = {            \
            __FILE__, __func__, name, __LINE__, __COUNTER__};                                      \
        &site_;                                                                                    \
    }))

/* A site without a verb: it cannot be skipped, and no other host is scheduled there. */
#define BL_MARK(name)                                                                              \
    (__extension__({                                                                               \
        static const bl_site site_ = {__FILE__, __func__, name, __LINE__, 0};                      \
        &site_;                                                                                    \
    }))

uint64_t bl_sim_load64(const bl_memory *memory, uint64_t offset, const bl_site *site);
void bl_sim_prefetch_line(const bl_memory *memory, uint64_t offset, const bl_site *site);
void bl_sim_prefetch_range(const bl_memory *memory, uint64_t offset, uint64_t size,
                           const bl_site *site);
void bl_sim_load_line(const bl_memory *memory, uint64_t offset, void *line, const bl_site *site);
void bl_sim_stream(const bl_memory *memory, uint64_t offset, const void *source, uint64_t size,
                   const bl_site *site);
void bl_sim_fetch(const bl_memory *memory, uint64_t offset, void *target, uint64_t size,
                  const bl_site *site);
void bl_sim_invalidate(const bl_memory *memory, uint64_t offset, uint64_t size,
                       const bl_site *site);
void bl_sim_fence_store(const bl_memory *memory, const bl_site *site);
void bl_sim_fence_full(const bl_memory *memory, const bl_site *site);
int bl_sim_verify(const bl_memory *memory, int condition, const bl_site *site);
int bl_sim_condition(int condition, const bl_site *site);
uint64_t bl_sim_now_ns(const bl_memory *memory);
void bl_sim_believe(const bl_memory *memory, uint64_t offset, const bl_site *mark);
void bl_sim_rely(const bl_memory *memory, uint64_t offset, uint64_t size, const bl_site *mark);
void bl_sim_confirm(const bl_memory *memory, uint64_t look, uint64_t offset, uint64_t size,
                    const bl_site *mark);
void bl_sim_ordered(const bl_memory *memory, uint64_t look, uint64_t written, const bl_site *mark);
void bl_sim_pause(const bl_memory *memory);
void bl_sim_nap(const bl_memory *memory, uint64_t ns);

/* A mutex of threads (coherence/mutex.h). */
typedef struct bl_mutex {
    uint32_t held;
    uint32_t snapshot;          /* what its last holder had fenced */
} bl_mutex;

void bl_sim_mutex_lock(const bl_memory *memory, bl_mutex *mutex);
void bl_sim_mutex_unlock(const bl_memory *memory, bl_mutex *mutex);

struct bl_sleeper;              /* liveness/wake.h */
struct bl_waker;
void bl_sim_announce(const bl_memory *memory, struct bl_sleeper *sleeper, const bl_site *site);
void bl_sim_wake(const bl_memory *memory, const struct bl_waker *waker, const bl_site *site);
uint64_t bl_sim_quiet_ns(const bl_memory *memory);

/* Store into this host's cache, as an incorrect program would; there is no verb for this. */
void bl_sim_store_here(const bl_memory *memory, uint64_t offset, const void *source,
                       uint32_t size, const bl_site *site);
#define bl_sim_store_cached(memory, offset, source, size) \
    bl_sim_store_here(memory, offset, source, size, BL_MARK("store_cached"))

#define bl_load64(memory, offset) bl_sim_load64(memory, offset, BL_SITE("load64"))
#define bl_prefetch_line(memory, offset) \
    bl_sim_prefetch_line(memory, offset, BL_SITE("prefetch_line"))
#define bl_prefetch_range(memory, offset, size) \
    bl_sim_prefetch_range(memory, offset, size, BL_SITE("prefetch_range"))
#define bl_load_line(memory, offset, line) \
    bl_sim_load_line(memory, offset, line, BL_SITE("load_line"))
#define bl_stream_line(memory, offset, line) \
    bl_sim_stream(memory, offset, line, BL_LINE_SIZE, BL_SITE("stream_line"))
#define bl_stream(memory, offset, source, size) \
    bl_sim_stream(memory, offset, source, size, BL_SITE("stream"))
#define bl_fetch(memory, offset, target, size) \
    bl_sim_fetch(memory, offset, target, size, BL_SITE("fetch"))
#define bl_stream_crc(memory, offset, source, size, seed) \
    (bl_stream(memory, offset, source, size), bl_crc32c(seed, source, size))
#define bl_fetch_run(memory, offset, target, size, crc, how) \
    ((void)(how), bl_fetch(memory, offset, target, size), \
     (crc) != NULL ? (void)(*(crc) = bl_crc32c(*(crc), target, size)) : (void)0)
#define bl_invalidate(memory, offset, size) \
    bl_sim_invalidate(memory, offset, size, BL_SITE("invalidate"))
#define bl_fence_store(memory) bl_sim_fence_store(memory, BL_SITE("fence_store"))
#define bl_fence_full(memory) bl_sim_fence_full(memory, BL_SITE("fence_full"))
#define bl_verify(memory, condition) bl_sim_verify(memory, (condition) != 0, BL_SITE("verify"))
/* tests/sim/conditions.py wraps each condition in a copy of the protocol's source into this
 * macro. */
#define BL_CONDITION(name, condition) bl_sim_condition((condition) != 0, BL_SITE(name))

#define bl_believe(memory, offset) bl_sim_believe(memory, offset, BL_MARK("believe"))
#define bl_rely(memory, offset, size) bl_sim_rely(memory, offset, size, BL_MARK("rely"))
#define bl_confirm(memory, look, offset, size) \
    bl_sim_confirm(memory, look, offset, size, BL_MARK("confirm"))
#define bl_ordered(memory, look, written) \
    bl_sim_ordered(memory, look, written, BL_MARK("ordered"))
#define bl_now_ns(memory) bl_sim_now_ns(memory)
#define bl_pause(memory) bl_sim_pause(memory)
#define bl_nap(memory, ns) bl_sim_nap(memory, ns)
#define bl_announce(memory, sleeper) bl_sim_announce(memory, sleeper, BL_SITE("announce"))
#define bl_wake(memory, directory, waker) bl_sim_wake(memory, waker, BL_SITE("wake"))
#define bl_quiet_ns(memory) bl_sim_quiet_ns(memory)

#endif
