/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The task queues of index/tasks.h, as two lists per queue: waiting tasks in order, and claimed
 * tasks unordered. Expired claims end at the next call for their queue. A claim and its end do not
 * reset a task's age.
 */
#include "index/tasks.h"

#include <errno.h>
#include <stdlib.h>

enum { BL_NO_PLACE = 0xffffffff };

enum bl_task_state { BL_TASK_FREE = 0, BL_TASK_TAKEN, BL_TASK_WAITING, BL_TASK_CLAIMED };

typedef struct bl_task_place {
    uint64_t generation;
    uint64_t since_ns;
    uint64_t until_ns;          /* when the claim ends */
    uint32_t block;
    uint32_t lane;              /* the lane that has the claim */
    uint32_t deliveries;
    uint32_t queue;             /* index of its queue */
    uint32_t state;             /* bl_task_state */
    uint32_t next, previous;    /* slots, or BL_NO_PLACE */
} bl_task_place;

typedef struct bl_task_list {
    uint32_t first, last;
    uint32_t count;
} bl_task_list;

typedef struct bl_task_queue {
    uint64_t name;
    bl_task_list waiting, claimed; /* a queue without tasks is free */
} bl_task_queue;

struct bl_tasks {
    bl_task_queue queue[BL_QUEUES_MAX];
    bl_task_place *place;
    uint32_t free_place;        /* first of the slots given back, linked by next */
    uint32_t fresh_place;       /* slots from here on were never used */
    uint32_t count_max;
};

static const bl_task_list bl_task_none = {BL_NO_PLACE, BL_NO_PLACE, 0};

int bl_tasks_create(bl_tasks **out, uint32_t count_max)
{
    bl_tasks *tasks = calloc(1, sizeof *tasks);
    bl_task_place *place = calloc(count_max ? count_max : 1, sizeof *place);
    if (!tasks || !place) {
        free(place);
        free(tasks);
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < BL_QUEUES_MAX; i++)
        tasks->queue[i] = (bl_task_queue){0, bl_task_none, bl_task_none};
    tasks->place = place;
    tasks->free_place = BL_NO_PLACE;
    tasks->count_max = count_max;
    *out = tasks;
    return 0;
}

void bl_tasks_destroy(bl_tasks *tasks)
{
    if (!tasks)
        return;
    free(tasks->place);
    free(tasks);
}

static bl_task_list *bl_task_list_of(bl_tasks *tasks, const bl_task_place *task)
{
    bl_task_queue *queue = &tasks->queue[task->queue];
    return task->state == BL_TASK_CLAIMED ? &queue->claimed : &queue->waiting;
}

/* Insert a task into its list, following the slot `after`; BL_NO_PLACE: before all others. */
static void bl_task_link(bl_tasks *tasks, uint32_t place, uint32_t after)
{
    bl_task_place *task = &tasks->place[place];
    bl_task_list *list = bl_task_list_of(tasks, task);
    task->previous = after;
    task->next = after == BL_NO_PLACE ? list->first : tasks->place[after].next;
    *(after == BL_NO_PLACE ? &list->first : &tasks->place[after].next) = place;
    *(task->next == BL_NO_PLACE ? &list->last : &tasks->place[task->next].previous) = place;
    list->count++;
}

static void bl_task_unlink(bl_tasks *tasks, uint32_t place)
{
    const bl_task_place *task = &tasks->place[place];
    bl_task_list *list = bl_task_list_of(tasks, task);
    *(task->previous == BL_NO_PLACE ? &list->first : &tasks->place[task->previous].next) =
        task->next;
    *(task->next == BL_NO_PLACE ? &list->last : &tasks->place[task->next].previous) =
        task->previous;
    list->count--;
}

/* Insert in the order of generations, from the end: a new task is nearly always the last. */
static void bl_task_wait(bl_tasks *tasks, uint32_t place)
{
    bl_task_place *task = &tasks->place[place];
    uint32_t after = tasks->queue[task->queue].waiting.last;
    while (after != BL_NO_PLACE && tasks->place[after].generation > task->generation)
        after = tasks->place[after].previous;
    task->state = BL_TASK_WAITING;
    bl_task_link(tasks, place, after);
}

/* End a claim, and put the task back into its queue. */
static void bl_task_return(bl_tasks *tasks, uint32_t place)
{
    bl_task_unlink(tasks, place);
    bl_task_wait(tasks, place);
}

int bl_tasks_full(const bl_tasks *tasks)
{
    return tasks->free_place == BL_NO_PLACE && tasks->fresh_place >= tasks->count_max;
}

int64_t bl_tasks_take(bl_tasks *tasks, uint32_t block)
{
    uint32_t place = tasks->free_place;
    if (place != BL_NO_PLACE)
        tasks->free_place = tasks->place[place].next;
    else if (tasks->fresh_place < tasks->count_max)
        place = tasks->fresh_place++;
    else
        return -ENOSPC;
    tasks->place[place] = (bl_task_place){.block = block, .state = BL_TASK_TAKEN};
    return place;
}

/* Find the queue with this name, or else a free one. Returns its index, or -1. */
static int64_t bl_task_queue_find(const bl_tasks *tasks, uint64_t name)
{
    int64_t unused = -1;
    for (uint32_t i = 0; i < BL_QUEUES_MAX; i++) {
        const bl_task_queue *queue = &tasks->queue[i];
        if (queue->waiting.count + queue->claimed.count == 0)
            unused = unused < 0 ? i : unused;
        else if (queue->name == name)
            return i;
    }
    return unused;
}

int bl_tasks_add(bl_tasks *tasks, uint32_t place, uint64_t queue, uint64_t generation,
                 uint64_t now_ns)
{
    bl_task_place *task = &tasks->place[place];
    int64_t index = bl_task_queue_find(tasks, queue);
    if (index < 0)
        return -ENOSPC;
    tasks->queue[index].name = queue;
    task->queue = (uint32_t)index;
    task->generation = generation;
    task->since_ns = now_ns;
    bl_task_wait(tasks, place);
    return 0;
}

int bl_tasks_waits(const bl_tasks *tasks, uint32_t place, uint64_t now_ns)
{
    const bl_task_place *task = &tasks->place[place];
    return task->state == BL_TASK_WAITING ||
           (task->state == BL_TASK_CLAIMED && task->until_ns <= now_ns);
}

void bl_tasks_remove(bl_tasks *tasks, uint32_t place)
{
    bl_task_place *task = &tasks->place[place];
    if (task->state == BL_TASK_WAITING || task->state == BL_TASK_CLAIMED)
        bl_task_unlink(tasks, place);
    task->state = BL_TASK_FREE;
    task->next = tasks->free_place;
    tasks->free_place = place;
}

/* End the claims of a queue that have expired, or that belong to a lane. */
static void bl_task_queue_expire(bl_tasks *tasks, bl_task_queue *queue, uint64_t now_ns,
                                 uint32_t lane)
{
    uint32_t next, place = queue->claimed.first;
    for (; place != BL_NO_PLACE; place = next) {
        const bl_task_place *task = &tasks->place[place];
        next = task->next;
        if (task->until_ns <= now_ns || task->lane == lane)
            bl_task_return(tasks, place);
    }
}

int64_t bl_tasks_claim(bl_tasks *tasks, uint64_t name, uint32_t lane, uint64_t now_ns,
                       uint64_t until_ns)
{
    int64_t index = bl_task_queue_find(tasks, name);
    if (index < 0)
        return -1;
    bl_task_queue *queue = &tasks->queue[index];
    bl_task_queue_expire(tasks, queue, now_ns, BL_NO_PLACE);
    uint32_t place = queue->waiting.first;
    if (place == BL_NO_PLACE)
        return -1;
    bl_task_place *task = &tasks->place[place];
    bl_task_unlink(tasks, place);
    task->state = BL_TASK_CLAIMED;
    task->lane = lane;
    task->until_ns = until_ns;
    task->deliveries++;
    bl_task_link(tasks, place, queue->claimed.last);
    return place;
}

int bl_tasks_extend(bl_tasks *tasks, uint32_t place, uint32_t lane, uint64_t now_ns,
                    uint64_t until_ns)
{
    bl_task_place *task = &tasks->place[place];
    if (task->state != BL_TASK_CLAIMED || task->lane != lane || task->until_ns <= now_ns)
        return -ENOENT;
    task->until_ns = until_ns;
    if (until_ns <= now_ns)
        bl_task_return(tasks, place);
    return 0;
}

void bl_tasks_lane_gone(bl_tasks *tasks, uint32_t lane)
{
    for (uint32_t i = 0; i < BL_QUEUES_MAX; i++)
        bl_task_queue_expire(tasks, &tasks->queue[i], 0, lane);
}

int64_t bl_tasks_older(const bl_tasks *tasks, uint64_t then_ns)
{
    for (uint32_t i = 0; i < BL_QUEUES_MAX; i++) {
        uint32_t first = tasks->queue[i].waiting.first;
        if (first != BL_NO_PLACE && tasks->place[first].since_ns < then_ns)
            return first;
    }
    return -1;
}

uint32_t bl_tasks_block(const bl_tasks *tasks, uint32_t place)
{
    return tasks->place[place].block;
}

uint32_t bl_tasks_deliveries(const bl_tasks *tasks, uint32_t place)
{
    return tasks->place[place].deliveries;
}

void bl_tasks_count(bl_tasks *tasks, uint64_t name, uint64_t now_ns, uint32_t *waiting,
                    uint32_t *claimed)
{
    int64_t index = bl_task_queue_find(tasks, name);
    *waiting = *claimed = 0;
    if (index < 0)
        return;
    bl_task_queue_expire(tasks, &tasks->queue[index], now_ns, BL_NO_PLACE);
    *waiting = tasks->queue[index].waiting.count;
    *claimed = tasks->queue[index].claimed.count;
}
