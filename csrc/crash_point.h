/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Named places where a test ends or stops this very process, to see what others make of it.
 *
 *   bl_crash_point("what.step");
 *
 * A point stands between two steps that others can tell apart: a line that is out and the next that
 * is not. Names are unique, "what.step"; the linker gathers them, so nobody keeps a list. At most
 * one is armed, for the n-th time that it is passed. Unarmed it costs one branch on one word. In
 * the simulator, where a process can die at any verb, there are none.
 */
#ifndef BL_CRASH_POINT_H
#define BL_CRASH_POINT_H

#include "api.h"

typedef struct bl_crash_place {
    const char *name;
} bl_crash_place;

#ifdef BL_SIM

#define bl_crash_point(point_name) ((void)0)

#else

/* The place that is armed, or NULL. Set before other threads start, or by the one that passes. */
extern const bl_crash_place *bl_crash_armed;

/* Another passage of a place while one is armed. */
void bl_crash_pass(const bl_crash_place *place);

#define bl_crash_point(point_name)                                                                 \
    do {                                                                                           \
        static bl_crash_place place_ __attribute__((section("bl_crash_places"), used,              \
                                                    aligned(8))) = {point_name};                   \
        if (__builtin_expect(bl_crash_armed != NULL, 0))                                           \
            bl_crash_pass(&place_);                                                                \
    } while (0)

#endif

#endif
