/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The interface of a work queue: a portal that accepts a descriptor of one line, or reports that
 * the queue is full. Everything else, including results, passes through memory at addresses in the
 * descriptor. Behind the portal is a device (dsa/queue.c) or, in tests, a thread that behaves like
 * one (tests/native/dsa_soft.c).
 */
#ifndef BL_DSA_QUEUE_H
#define BL_DSA_QUEUE_H

#include <string.h>

#include "api/dsa.h"
#include "coherence/instructions.h"

typedef struct bl_dsa_queue_verbs {
    int (*submit)(bl_dsa_queue *queue, const bl_dsa_descriptor *descriptor);
    void (*ended)(bl_dsa_queue *queue);
    void (*close)(bl_dsa_queue *queue);
} bl_dsa_queue_verbs;

struct bl_dsa_queue {
    const bl_dsa_queue_verbs *verbs;
    uint32_t is_device;         /* 0: it ends with this process */
};

static inline uint32_t bl_dsa_flags(const bl_dsa_descriptor *descriptor)
{
    return descriptor->flags_opcode & 0xffffff;
}

static inline uint32_t bl_dsa_opcode(const bl_dsa_descriptor *descriptor)
{
    return descriptor->flags_opcode >> 24;
}

/* Read the first 8 bytes of a record at once: the status and its details. The device's other writes
 * are visible after it. */
static inline bl_dsa_record bl_dsa_record_look(const bl_dsa_record *record)
{
    bl_dsa_record seen = {0};
    uint64_t head = bl_shared_load((const uint64_t *)(uintptr_t)record);
    memcpy(&seen, &head, sizeof head);
    if (seen.status != BL_DSA_NONE)
        memcpy((uint8_t *)&seen + sizeof head, (const uint8_t *)record + sizeof head,
               sizeof seen - sizeof head);
    return seen;
}

#endif
