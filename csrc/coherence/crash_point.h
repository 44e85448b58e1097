/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Named places where a test kills or stops this process, to test how the other processes recover.
 *
 *   bl_crash_point("what.step");
 *   bl_crash_line("what.line", memory, offset, line);
 *
 * A point lies between two steps that other processes can distinguish: one line is published, and
 * the next is not. Names are unique, "what.step"; the linker collects them into a section. At most
 * one point is armed, for its n-th pass. An unarmed point costs one branch on one word. The
 * simulator needs no crash points: it can kill a process at any verb.
 *
 * The second kind lies before a line is published. It can also kill the process in the middle of
 * the publication: some words of the line are in memory, and the others are not. Only names of this
 * kind end in "line".
 */
#ifndef BL_CRASH_POINT_H
#define BL_CRASH_POINT_H

#include "coherence/memory.h"
#include "format/pool_format.h"

typedef struct bl_crash_place {
    const char *name;
    uint64_t is_line;
} bl_crash_place;

#ifdef BL_SIM

#define bl_crash_point(point_name) ((void)0)
#define bl_crash_line(point_name, memory, offset, line) ((void)0)

#else

/* The armed point, or NULL. It is set before other threads start, or by the thread that passes the
 * point. */
extern const bl_crash_place *bl_crash_armed;

/* Count a pass while a point is armed, and raise the signal at the armed pass. */
void bl_crash_pass(const bl_crash_place *place);

/* Do the same before the line is streamed to the offset. */
void bl_crash_pass_line(const bl_crash_place *place, const bl_memory *memory, uint64_t offset,
                        const void *line);

#define bl_crash_site(pass, ...)                                                                   \
    do {                                                                                           \
        static bl_crash_place place_ __attribute__((section("bl_crash_places"), used,              \
                                                    aligned(8))) = {__VA_ARGS__};                  \
        if (__builtin_expect(bl_crash_armed != NULL, 0))                                           \
            pass;                                                                                  \
    } while (0)

#define bl_crash_point(point_name) bl_crash_site(bl_crash_pass(&place_), point_name, 0)
#define bl_crash_line(point_name, memory, offset, line)                                            \
    bl_crash_site(bl_crash_pass_line(&place_, memory, offset, line), point_name, 1)

#endif

#endif
