/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The SIGBUS handler and its regions: see coherence/guard.h. The handler is installed by the first
 * region and never removed. It only reads the thread's regions and calls siglongjmp, which is
 * async-signal-safe here. With SA_NODEFER the signal is not blocked in the handler, so the jump
 * need not restore a signal mask.
 *
 * Other code may install handlers, too: faulthandler.enable() replaces this one, and restores it at
 * a fault. A thread that enters a region checks which handler is installed if its last check is
 * more than about 100 us ago (a system call each time would cost more than a short call), and
 * installs this handler over a foreign one. For a fault before that check, faulthandler prints its
 * report, restores this handler and raises the signal again: the handler returns, the access faults
 * again, and the region ends as usual.
 *
 * Example of a fault outside of every region, where this handler was installed over faulthandler's,
 * which was installed over this one, which was installed over the default. This handler calls
 * faulthandler's, which prints its report, restores this handler and raises the signal; the nested
 * call passes the signal to the lowest layer, the default, which ends the process.
 */
#include "coherence/guard.h"

#ifdef BL_SIM

int bl_guarded(const bl_memory *memory, bl_guarded_run run, void *context)
{
    (void)memory;
    return run(context); /* the simulator's memory has no device faults */
}

uint64_t bl_guard_offset(const bl_memory *memory)
{
    (void)memory;
    return UINT64_MAX;
}

const void *bl_guard_address(void) { return NULL; }

void bl_guard_adopt(const void *address) { (void)address; }

void bl_guard_look(void) {}

int bl_fault_judge(const bl_memory *memory, const void *address)
{
    (void)memory, (void)address;
    return -BL_ERROR_DEVICE_FAULT;
}

#else

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/host_atomic.h"
#include "coherence/instructions.h"

typedef struct bl_region {
    sigjmp_buf out;
    const bl_memory *memory;
    struct bl_region *outer;
    int raised;                 /* 1: a raised signal was ignored: a real fault recurs */
} bl_region;

/* The handler that an installation replaced. A layer is never freed, since a running handler may
 * read it. */
typedef struct bl_bus_layer {
    struct sigaction before;
    const struct bl_bus_layer *older;
} bl_bus_layer;

static __thread bl_region *bl_region_here;
static __thread const void *bl_bus_address;
static __thread int bl_bus_code;        /* si_code of the fault at bl_bus_address */
static __thread uint64_t bl_bus_checked; /* bl_ticks() at this thread's last check; 0: none */
static __thread uint32_t bl_bus_depth;  /* layers that the current fault was passed down */
static uint64_t bl_bus_top;             /* const bl_bus_layer *: the newest */

/* Return the device mapped at address, and the offset in it; device_count means none. */
static bl_place bl_bus_place(const bl_memory *memory, const void *address)
{
    bl_place place = {0, 0};
    for (; place.device < memory->map.device_count; place.device++) {
        place.device_offset = (uintptr_t)address - (uintptr_t)memory->base[place.device];
        if (place.device_offset < bl_device_size(&memory->map, place.device))
            break;
    }
    return place;
}

static int bl_region_has(const bl_region *region, const void *address)
{
    return bl_bus_place(region->memory, address).device < region->memory->map.device_count;
}

uint64_t bl_guard_offset(const bl_memory *memory)
{
    bl_place place = bl_bus_place(memory, bl_bus_address);
    return place.device < memory->map.device_count && place.device_offset >= BL_STRIPE_SIZE
               ? bl_interleave_offset(&memory->map, place)
               : UINT64_MAX;
}

const void *bl_guard_address(void) { return bl_bus_address; }

void bl_guard_adopt(const void *address) { bl_bus_address = address; }

/* Pass a signal that is not a fault of a region to the handler that was installed before this one.
 * If that handler raises it again, pass it to the next lower one. */
static void bl_bus_pass_on(int number, siginfo_t *info, void *context)
{
    const bl_bus_layer *layer = (const bl_bus_layer *)(uintptr_t)bl_host_load(&bl_bus_top);
    struct sigaction fallback = {.sa_handler = SIG_DFL};
    for (uint32_t i = 0; layer != NULL && i < bl_bus_depth; i++)
        layer = layer->older;
    const struct sigaction *before = layer != NULL ? &layer->before : &fallback;
    bl_bus_depth++;
    if (before->sa_flags & SA_SIGINFO) {
        before->sa_sigaction(number, info, context);
    } else if (before->sa_handler != SIG_DFL && before->sa_handler != SIG_IGN) {
        before->sa_handler(number);
    } else if (before->sa_handler == SIG_DFL || info->si_code > 0) {
        sigaction(number, &fallback, NULL); /* the access faults again, which ends the process */
        if (info->si_code <= 0)
            raise(number);
    }
    bl_bus_depth--;
}

static void bl_bus_handle(int number, siginfo_t *info, void *context)
{
    bl_region *here = bl_region_here;
    if (info->si_code > 0) { /* from the kernel, with an address */
        for (bl_region *region = here; region != NULL; region = region->outer)
            if (bl_region_has(region, info->si_addr)) {
                bl_region_here = region->outer;
                bl_bus_address = info->si_addr;
                bl_bus_code = info->si_code;
                siglongjmp(region->out, 1);
            }
    } else if (here != NULL && !here->raised && bl_bus_depth == 0 && info->si_code == SI_TKILL &&
               info->si_pid == getpid()) {
        here->raised = 1;
        return;
    }
    bl_bus_pass_on(number, info, context);
}

/* No lock, because a fork could leave it locked in the child. Two threads that install at once
 * record the same handler twice, which is harmless. */
static void bl_bus_install(void)
{
    struct sigaction action = {.sa_sigaction = bl_bus_handle,
                               .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    struct sigaction now;
    sigaction(SIGBUS, NULL, &now);
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == bl_bus_handle)
        return;
    bl_bus_layer *layer = malloc(sizeof *layer);
    if (layer == NULL)
        return; /* retried at the next check */
    layer->before = now;
    layer->older = (const bl_bus_layer *)(uintptr_t)bl_host_load(&bl_bus_top);
    bl_host_store(&bl_bus_top, (uint64_t)(uintptr_t)layer);
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, NULL);
}

void bl_guard_look(void)
{
    uint64_t now = bl_ticks();
    if (now - bl_bus_checked < bl_ticks_of_100_us())
        return;
    bl_bus_checked = now;
    bl_bus_install();
}

/* The kernel raises the same signal and code for a truncated file and for a full file system, but
 * in the latter case the file still has its length, with a hole at the missing page. */
int bl_fault_judge(const bl_memory *memory, const void *address)
{
    bl_place place = bl_bus_place(memory, address);
    struct stat file;
    if (memory->backing == NULL || place.device >= memory->map.device_count)
        return -BL_ERROR_DEVICE_FAULT;
    const bl_backing *backing = memory->backing + place.device;
    off_t page = (off_t)((backing->offset + place.device_offset) / BL_PAGE_SIZE * BL_PAGE_SIZE);
    off_t end = page + BL_PAGE_SIZE;
    if (backing->fd < 0 || fstat(backing->fd, &file) < 0 || file.st_size < end)
        return -BL_ERROR_DEVICE_FAULT;
    off_t data = lseek(backing->fd, page, SEEK_DATA);
    int hole = data < 0 ? errno == ENXIO : data >= end; /* ENXIO: there is a hole up to the end */
    return hole ? -BL_ERROR_NO_ROOM : -BL_ERROR_DEVICE_FAULT;
}

int bl_guarded(const bl_memory *memory, bl_guarded_run run, void *context)
{
    bl_region region = {.memory = memory, .outer = bl_region_here};
    if (region.outer == NULL) {
        bl_bus_depth = 0; /* a foreign handler may have left the last fault by a jump */
        bl_guard_look();
    }
    if (sigsetjmp(region.out, 0) != 0)
        return bl_bus_code == BUS_ADRERR ? bl_fault_judge(memory, bl_bus_address)
                                         : -BL_ERROR_DEVICE_FAULT; /* poisoned */
    bl_region_here = &region;
    int status = run(context);
    bl_region_here = region.outer;
    return status;
}

#endif
