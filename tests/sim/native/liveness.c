/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Liveness locks in the simulator: liveness/lock.h with a table instead of lock files. A descriptor
 * is an index into the table. The kernel's part is a full fence: what a process streamed has
 * arrived before others can observe that it released a lock or died.
 */
#include "liveness/lock.h"

#include <errno.h>
#include <stdio.h>

#include "coherence/mutex.h"
#include "liveness/pidfds.h"
#include "sim/native/world.h"

static int bl_sim_liveness_find(const bl_memory *memory, uint64_t nonce)
{
    const bl_sim_world *world = memory->world;
    for (uint32_t i = 0; i < world->liveness_count; i++) {
        const bl_sim_liveness *liveness_lock = &world->liveness_lock[i];
        if (liveness_lock->nonce == nonce && liveness_lock->host == memory->host &&
            !liveness_lock->removed)
            return (int)i;
    }
    return -ENOENT;
}

int bl_liveness_hold(const bl_memory *memory, const char *directory, uint64_t nonce)
{
    (void)directory;
    bl_sim_world *world = memory->world;
    if (bl_sim_liveness_find(memory, nonce) >= 0)
        return -EEXIST;
    if (world->liveness_count == BL_SIM_LIVENESS_COUNT)
        return -ENFILE;
    world->liveness_lock[world->liveness_count] =
        (bl_sim_liveness){.nonce = nonce, .holder = bl_sim_leader(world, world->current),
                          .host = memory->host};
    return (int)world->liveness_count++;
}

int bl_liveness_known(const bl_memory *memory, const char *directory, uint64_t nonce)
{
    (void)directory;
    return bl_sim_liveness_find(memory, nonce) >= 0;
}

int bl_liveness_watch(const bl_memory *memory, const char *directory, uint64_t nonce)
{
    (void)directory;
    return bl_sim_liveness_find(memory, nonce);
}

int bl_liveness_devices(const bl_memory *memory, int descriptor, int may_write)
{
    memory->world->liveness_lock[descriptor].has_devices = (uint32_t)may_write;
    return 0;
}

int bl_liveness_has_devices(const bl_memory *memory, int descriptor)
{
    return (int)memory->world->liveness_lock[descriptor].has_devices;
}

/* The kernel releases a dead process's lock while its devices may still write. */
static int bl_sim_unlocked(const bl_sim_world *world, const bl_sim_process *holder)
{
    for (uint32_t i = 0; i < world->process_count; i++)
        if (world->process[i]->leader == holder->number &&
            (world->process[i]->state == BL_SIM_READY || world->process[i]->store_count > 0))
            return 0;
    return 1;
}

/* Let the running process learn what all threads of a dead one have written. */
static void bl_sim_inherit(bl_sim_world *world, const bl_sim_process *holder)
{
    for (uint32_t i = 0; i < world->process_count; i++)
        if (world->process[i]->leader == holder->number) {
            bl_sim_note_release(world->process[i]);
            bl_sim_learn(world, world->current, bl_sim_snapshot_take(world, world->process[i]),
                         (uint32_t)world->stat.steps);
        }
}

/* Return a snapshot of what the threads of the running process have fenced: the kernel, or the
 * thread's own synchronization, has ordered that before what follows. */
static uint32_t bl_sim_fenced(bl_sim_world *world)
{
    bl_sim_process *self = world->current;
    bl_sim_fence(world, self);
    for (uint32_t i = 0; i < world->process_count; i++)
        if (world->process[i]->leader == self->leader && world->process[i] != self)
            bl_sim_learn(world, self, bl_sim_snapshot_take(world, world->process[i]),
                         (uint32_t)world->stat.steps);
    return bl_sim_snapshot_take(world, self);
}

int bl_liveness_gone(const bl_memory *memory, int descriptor)
{
    bl_sim_world *world = memory->world;
    bl_sim_liveness *liveness_lock = &world->liveness_lock[descriptor];
    if (liveness_lock->holder &&
        !(liveness_lock->has_devices ? bl_sim_gone(liveness_lock->holder)
          : bl_sim_unlocked(world, liveness_lock->holder)))
        return 0;
    if (liveness_lock->holder)
        bl_sim_inherit(world, liveness_lock->holder);
    bl_sim_learn(world, world->current, liveness_lock->snapshot, (uint32_t)world->stat.steps);
    return 1;
}

void bl_liveness_end(const bl_memory *memory, const char *directory, uint64_t nonce, int descriptor,
                     int remove)
{
    (void)directory;
    bl_sim_world *world = memory->world;
    int found = remove ? bl_sim_liveness_find(memory, nonce) : -ENOENT;
    if (descriptor >= 0 && world->liveness_lock[descriptor].holder ==
                               bl_sim_leader(world, world->current)) {
        world->liveness_lock[descriptor].snapshot = bl_sim_fenced(world);
        world->liveness_lock[descriptor].holder = NULL;
    }
    if (found >= 0)
        world->liveness_lock[found].removed = 1;
}

int bl_liveness_left(const bl_memory *memory, const char *directory, uint64_t *nonces,
                     uint32_t count_max)
{
    (void)directory;
    const bl_sim_world *world = memory->world;
    uint32_t count = 0;
    for (uint32_t i = 0; i < world->liveness_count && count < count_max; i++)
        if (world->liveness_lock[i].host == memory->host && !world->liveness_lock[i].removed &&
            bl_liveness_gone(memory, (int)i))
            nonces[count++] = world->liveness_lock[i].nonce;
    return (int)count;
}

/* The simulator has no pidfds: the lock is the only proof. */

int bl_pidfds_open(const bl_memory *memory, const char *directory, uint64_t nonce,
                   uint32_t count_max, bl_pidfds **out)
{
    (void)memory, (void)directory, (void)nonce, (void)count_max;
    *out = NULL;
    return 0;
}

void bl_pidfds_close(bl_pidfds *pidfds) { (void)pidfds; }
void bl_pidfds_forget(bl_pidfds *pidfds, uint64_t nonce) { (void)pidfds, (void)nonce; }

uint64_t bl_pidfds_look(bl_pidfds *pidfds)
{
    (void)pidfds;
    return 0;
}

int bl_pidfds_descriptor(const bl_pidfds *pidfds)
{
    (void)pidfds;
    return -1;
}

uint32_t bl_pidfds_pid(const bl_pidfds *pidfds, uint64_t nonce)
{
    (void)pidfds, (void)nonce;
    return 0;
}

uint32_t bl_pidfds_count(const bl_pidfds *pidfds)
{
    (void)pidfds;
    return 0;
}

void bl_pidfds_show(const bl_memory *memory, const char *directory, uint64_t server_nonce,
                    uint64_t nonce)
{
    (void)memory, (void)directory, (void)server_nonce, (void)nonce;
}

int bl_host_lock(const bl_memory *memory, const char *directory, const char *name)
{
    (void)directory;
    bl_sim_world *world = memory->world;
    uint32_t i = 0;
    while (i < world->lock_count &&
           (world->lock[i].host != memory->host || strcmp(world->lock[i].name, name) != 0))
        i++;
    bl_sim_lock *lock = &world->lock[i];
    if (i == world->lock_count) {
        if (i == BL_SIM_LOCK_COUNT || strlen(name) >= sizeof lock->name)
            return -ENFILE;
        strcpy(lock->name, name);
        lock->host = memory->host;
        world->lock_count++;
    } else if (lock->holder && !bl_sim_unlocked(world, lock->holder)) {
        return -EAGAIN;
    } else if (lock->holder) {
        bl_sim_inherit(world, lock->holder);
    }
    bl_sim_learn(world, world->current, lock->snapshot, (uint32_t)world->stat.steps);
    bl_sim_fence(world, world->current);
    lock->holder = bl_sim_leader(world, world->current);
    return (int)i;
}

void bl_host_unlock(const bl_memory *memory, int descriptor)
{
    bl_sim_world *world = memory->world;
    world->lock[descriptor].snapshot = bl_sim_fenced(world);
    world->lock[descriptor].holder = NULL;
}

/* Threads of one process: a mutex passes on what its holder has fenced. */

enum { BL_SIM_LOCK_NAP_NS = 1000 };

void bl_sim_mutex_lock(const bl_memory *memory, bl_mutex *mutex)
{
    bl_sim_world *world = memory->world;
    while (mutex->held)
        bl_nap(memory, BL_SIM_LOCK_NAP_NS);
    mutex->held = 1;
    if (world->current)
        bl_sim_learn(world, world->current, mutex->snapshot, (uint32_t)world->stat.steps);
}

void bl_sim_mutex_unlock(const bl_memory *memory, bl_mutex *mutex)
{
    bl_sim_world *world = memory->world;
    mutex->held = 0;
    if (world->current)
        mutex->snapshot = bl_sim_snapshot_take(world, world->current);
}

int bl_boot_id(const bl_memory *memory, uint64_t boot_id[2])
{
    bl_sim_world *world = memory->world;
    const bl_sim_host *host = &world->host[memory->host];
    boot_id[0] = memory->host + 1;
    boot_id[1] = host->boot;
    if (world->current) /* earlier boots of this host have provably ended */
        bl_sim_learn(world, world->current, host->over, (uint32_t)world->stat.steps);
    return 0;
}

uint64_t bl_new_nonce(const bl_memory *memory)
{
    return bl_sim_random(memory->world) | 1;
}
