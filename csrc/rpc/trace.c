/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The file of the trace: see rpc/trace.h. All its space is allocated before it is mapped, since a
 * store into a page for which a full disk has no room would end the server.
 */
#include "rpc/trace.h"

#ifndef BL_SIM

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "liveness/lock.h"

enum { BL_TRACE_SIZE = BL_TRACE_HEAD_SIZE + BL_TRACE_ENTRIES * (int)sizeof(bl_trace_entry) };

static uint64_t bl_trace_clock(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Create a file with space for the ring. Returns a descriptor, or -errno. */
static int bl_trace_file(const char *path)
{
    unlink(path); /* of a server that died while it created the file */
    int descriptor = open(path, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0640);
    if (descriptor < 0)
        return -errno;
    (void)!fchmod(descriptor, 0640); /* the directory's mode controls access, not the umask */
    int error = posix_fallocate(descriptor, 0, BL_TRACE_SIZE);
    if (error == 0)
        return descriptor;
    close(descriptor);
    unlink(path);
    return -error;
}

int bl_trace_open(bl_trace *trace, const char *directory, uint64_t epoch,
                  const bl_takeover_cause *takeover)
{
    char path[BL_PATH_SIZE + 16], made[BL_PATH_SIZE + 16], old[BL_PATH_SIZE + 16];
    snprintf(path, sizeof path, "%.*s/trace", BL_PATH_SIZE, directory);
    snprintf(made, sizeof made, "%.*s/trace.new", BL_PATH_SIZE, directory);
    snprintf(old, sizeof old, "%.*s/trace.1", BL_PATH_SIZE, directory);
    rename(path, old);
    int descriptor = bl_trace_file(made);
    if (descriptor < 0)
        return descriptor;
    void *memory = mmap(NULL, BL_TRACE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    int status = memory == MAP_FAILED ? -errno : 0;
    close(descriptor);
    if (status == 0) {
        madvise(memory, BL_TRACE_SIZE, MADV_DONTFORK);
        trace->head = memory;
        trace->entries = (bl_trace_entry *)((uint8_t *)memory + BL_TRACE_HEAD_SIZE);
        *trace->head = (bl_trace_head){
            .magic = {'B', 'L', 'T', 'R', 'A', 'C', 'E', '2'},
            .entry_size = sizeof(bl_trace_entry),
            .entry_count = BL_TRACE_ENTRIES,
            .epoch = epoch,
            .pid = (uint64_t)getpid(),
            .takeover = *takeover,
        };
        bl_trace_mark(trace);
        trace->head->first = trace->head->last;
        if (rename(made, path) < 0) {
            status = -errno;
            bl_trace_close(trace);
        }
    }
    if (status < 0)
        unlink(made);
    return status;
}

/* A reader of a partly written mark gets times that are wrong by the interval between two marks. */
void bl_trace_mark(const bl_trace *trace)
{
    if (!trace->head)
        return;
    trace->head->last = (bl_trace_clocks){
        .ticks = bl_ticks(),
        .monotonic_ns = bl_trace_clock(CLOCK_MONOTONIC),
        .realtime_ns = bl_trace_clock(CLOCK_REALTIME),
    };
}

void bl_trace_close(bl_trace *trace)
{
    if (!trace->head)
        return;
    bl_trace_mark(trace);
    trace->head->ended = 1;
    munmap(trace->head, BL_TRACE_SIZE);
    *trace = (bl_trace){0};
}

#else

/* The simulator's servers have no trace: their runs can be repeated. */
int bl_trace_open(bl_trace *trace, const char *directory, uint64_t epoch,
                  const bl_takeover_cause *takeover)
{
    (void)trace, (void)directory, (void)epoch, (void)takeover;
    return 0;
}

void bl_trace_mark(const bl_trace *trace) { (void)trace; }

void bl_trace_close(bl_trace *trace) { (void)trace; }

#endif
