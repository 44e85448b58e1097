/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Watching over processes by pidfd: see liveness/life.h. One epoll instance says who came and who
 * ended.
 */
#include "liveness/life.h"

#ifndef BL_SIM

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "coherence/crash_point.h"
#include "liveness/proof.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5 */
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

enum { BL_LIFE_BACKLOG = 128, BL_LIFE_LISTENER = UINT32_MAX };
enum { BL_LIFE_EVENTS = 64 };   /* in one look: the server has others to serve */

/* A process: it has connected (socket), then said who it is (pidfd). Neither: the place is free. */
typedef struct bl_life_peer {
    uint64_t nonce;
    int socket;
    int pidfd;
} bl_life_peer;

struct bl_life {
    const bl_memory *memory;
    char directory[BL_PATH_SIZE];
    int epoll;
    int listener;
    uint32_t count;
    uint32_t count_max;
    bl_life_peer peers[];
};

/* The socket's address; the directory is named by a descriptor, for its path may be too long for
 * one. The descriptor, or -errno. */
static int bl_life_address(const char *directory, uint64_t nonce, struct sockaddr_un *address)
{
    int descriptor = open(directory, O_PATH | O_DIRECTORY | O_CLOEXEC);
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    if (descriptor < 0)
        return -errno;
    snprintf(address->sun_path, sizeof address->sun_path, "/proc/self/fd/%d/life-%016llx",
             descriptor, (unsigned long long)nonce);
    return descriptor;
}

static int bl_life_watch(const bl_life *life, int descriptor, uint32_t place)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = place};
    return epoll_ctl(life->epoll, EPOLL_CTL_ADD, descriptor, &event);
}

static void bl_life_drop(const bl_life *life, int *descriptor)
{
    if (*descriptor < 0)
        return;
    epoll_ctl(life->epoll, EPOLL_CTL_DEL, *descriptor, NULL); /* a child may hold a copy open */
    close(*descriptor);
    *descriptor = -1;
}

static int bl_life_listen(bl_life *life, uint64_t nonce)
{
    struct sockaddr_un address;
    int directory = bl_life_address(life->directory, nonce, &address);
    if (directory < 0)
        return directory;
    int status = 0;
    if (bind(life->listener, (struct sockaddr *)&address, sizeof address) < 0 ||
        chmod(address.sun_path, 0660) < 0 || listen(life->listener, BL_LIFE_BACKLOG) < 0 ||
        bl_life_watch(life, life->listener, BL_LIFE_LISTENER) < 0)
        status = -errno;
    close(directory);
    return status;
}

int bl_life_open(const bl_memory *memory, const char *directory, uint64_t nonce,
                 uint32_t count_max, bl_life **out)
{
    bl_life *life = malloc(sizeof *life + count_max * sizeof *life->peers);
    *out = NULL;
    if (life == NULL)
        return -ENOMEM;
    *life = (bl_life){.memory = memory, .count_max = count_max};
    strcpy(life->directory, directory);
    for (uint32_t i = 0; i < count_max; i++)
        life->peers[i] = (bl_life_peer){.socket = -1, .pidfd = -1};
    life->listener = -1;
    life->epoll = epoll_create1(EPOLL_CLOEXEC);
    int status = life->epoll < 0 ? -errno : 0;
    if (status == 0) {
        life->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        status = life->listener < 0 ? -errno : bl_life_listen(life, nonce);
    }
    if (status == 0)
        *out = life;
    else
        bl_life_close(life);
    return bl_error_passes(-status) ? status : 0;
}

void bl_life_close(bl_life *life)
{
    for (uint32_t i = 0; i < life->count_max; i++) {
        if (life->peers[i].socket >= 0)
            close(life->peers[i].socket);
        if (life->peers[i].pidfd >= 0)
            close(life->peers[i].pidfd);
    }
    if (life->listener >= 0)
        close(life->listener);
    if (life->epoll >= 0)
        close(life->epoll);
    free(life);
}

/* 0, or -errno that passes: who has connected waits in the listener's queue. */
static int bl_life_accept(bl_life *life)
{
    int peer = accept4(life->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    uint32_t place = 0;
    if (peer < 0)
        return bl_error_passes(errno) ? -errno : 0;
    while (place < life->count_max && (life->peers[place].socket >= 0 ||
                                       life->peers[place].pidfd >= 0))
        place++;
    if (place == life->count_max || bl_life_watch(life, peer, place) < 0)
        close(peer); /* the lock file is its proof */
    else
        life->peers[place].socket = peer;
    return 0;
}

/* A pidfd of who has connected: from the kernel, or by its pid if that is certain to be its own
 * still: it is, while the process that holds the proof lives. Or -errno. */
static int bl_life_pidfd(const bl_life *life, int socket, uint64_t nonce)
{
    int pidfd;
    socklen_t size = sizeof pidfd;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &size) == 0)
        return pidfd;
    if (bl_error_passes(errno))
        return -errno;
    struct ucred peer;
    size = sizeof peer;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0 || peer.pid <= 0)
        return -ESRCH;
    pidfd = (int)syscall(SYS_pidfd_open, peer.pid, 0);
    if (pidfd < 0)
        return -errno;
    int proof = bl_proof_watch(life->memory, life->directory, nonce);
    if (proof >= 0) {
        int gone = bl_proof_gone(life->memory, proof);
        bl_host_unlock(life->memory, proof);
        if (!gone)
            return pidfd;
    }
    close(pidfd);
    return proof < 0 ? proof : -ESRCH;
}

/* Hear who a peer is: 0, or -errno that passes, and what it said waits in its socket. */
static int bl_life_meet(bl_life *life, uint32_t place)
{
    bl_life_peer *peer = &life->peers[place];
    uint64_t nonce = 0;
    ssize_t size = recv(peer->socket, &nonce, sizeof nonce, MSG_DONTWAIT | MSG_PEEK);
    if (size < 0 && errno == EAGAIN)
        return 0;
    int pidfd = size == sizeof nonce && nonce != 0 ? bl_life_pidfd(life, peer->socket, nonce)
                                                   : -EINVAL;
    if (pidfd >= 0 && bl_life_watch(life, pidfd, place) < 0) {
        int error = errno;
        close(pidfd);
        pidfd = -error;
    }
    if (bl_error_passes(-pidfd))
        return pidfd;
    bl_life_drop(life, &peer->socket);
    if (pidfd < 0)
        return 0;
    peer->nonce = nonce;
    peer->pidfd = pidfd;
    life->count++;
    return 0;
}

/* The kernel tells of all that is ready in turn, so whoever has to wait keeps no death unseen: the
 * next look begins with the next event, and a death gives descriptors back. */
uint64_t bl_life_look(bl_life *life)
{
    struct epoll_event event;
    int status = 0;
    for (int i = 0; i < BL_LIFE_EVENTS && status == 0; i++) {
        if (epoll_wait(life->epoll, &event, 1, 0) != 1)
            break;
        uint32_t place = event.data.u32;
        if (place == BL_LIFE_LISTENER) {
            status = bl_life_accept(life);
        } else if (life->peers[place].socket >= 0) {
            status = bl_life_meet(life, place);
        } else {
            uint64_t nonce = life->peers[place].nonce;
            bl_life_drop(life, &life->peers[place].pidfd);
            life->count--;
            bl_crash_point("life.ended");
            return nonce;
        }
    }
    return 0;
}

void bl_life_forget(bl_life *life, uint64_t nonce)
{
    for (uint32_t i = 0; i < life->count_max; i++)
        if (life->peers[i].pidfd >= 0 && life->peers[i].nonce == nonce) {
            bl_life_drop(life, &life->peers[i].pidfd);
            life->count--;
        }
}

uint32_t bl_life_count(const bl_life *life) { return life->count; }

void bl_life_show(const bl_memory *memory, const char *directory, uint64_t server_nonce,
                  uint64_t nonce)
{
    (void)memory;
    struct sockaddr_un address;
    int place = bl_life_address(directory, server_nonce, &address);
    if (place < 0)
        return;
    int server = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (server >= 0 && connect(server, (struct sockaddr *)&address, sizeof address) == 0) {
        bl_crash_point("ask.connected");
        (void)!send(server, &nonce, sizeof nonce, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    if (server >= 0)
        close(server);
    close(place);
}

#endif
