/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Watches processes by pidfd: see liveness/pidfds.h. One epoll instance reports which processes
 * connected and which ended.
 */
#include "liveness/pidfds.h"

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
#include "liveness/lock.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5 */
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

enum { BL_PIDFDS_BACKLOG = 128, BL_PIDFDS_LISTENER = UINT32_MAX };
enum { BL_PIDFDS_EVENTS = 64 };   /* per call: the server has other clients to serve */

/* A process that has connected (socket), and then sent its session's nonce (pidfd). With neither,
 * the slot is free. */
typedef struct bl_pidfds_peer {
    uint64_t nonce;
    int socket;
    int pidfd;
    uint32_t pid;
} bl_pidfds_peer;

struct bl_pidfds {
    const bl_memory *memory;
    char directory[BL_PATH_SIZE];
    int epoll;
    int listener;
    uint32_t count;
    uint32_t count_max;
    int waits;                  /* 1: a connection could not be accepted for lack of descriptors */
    bl_pidfds_peer peers[];
};

/* Make the socket's address. It names the directory by a descriptor, because its path may be too
 * long for an address. Returns the descriptor, or -errno. */
static int bl_pidfds_address(const char *directory, uint64_t nonce, struct sockaddr_un *address)
{
    int descriptor = open(directory, O_PATH | O_DIRECTORY | O_CLOEXEC);
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    if (descriptor < 0)
        return -errno;
    snprintf(address->sun_path, sizeof address->sun_path,
             "/proc/self/fd/%d/" BL_LIVENESS_SOCKET "-%016llx", descriptor,
             (unsigned long long)nonce);
    return descriptor;
}

static int bl_pidfds_watch(const bl_pidfds *pidfds, int descriptor, uint32_t place)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = place};
    return epoll_ctl(pidfds->epoll, EPOLL_CTL_ADD, descriptor, &event);
}

static void bl_pidfds_drop(const bl_pidfds *pidfds, int *descriptor)
{
    if (*descriptor < 0)
        return;
    epoll_ctl(pidfds->epoll, EPOLL_CTL_DEL, *descriptor, NULL); /* a child may hold a copy open */
    close(*descriptor);
    *descriptor = -1;
}

static int bl_pidfds_listen(bl_pidfds *pidfds, uint64_t nonce)
{
    struct sockaddr_un address;
    int directory = bl_pidfds_address(pidfds->directory, nonce, &address);
    if (directory < 0)
        return directory;
    int status = 0;
    if (bind(pidfds->listener, (struct sockaddr *)&address, sizeof address) < 0 ||
        chmod(address.sun_path, 0660) < 0 || listen(pidfds->listener, BL_PIDFDS_BACKLOG) < 0 ||
        bl_pidfds_watch(pidfds, pidfds->listener, BL_PIDFDS_LISTENER) < 0)
        status = -errno;
    close(directory);
    return status;
}

int bl_pidfds_open(const bl_memory *memory, const char *directory, uint64_t nonce,
                   uint32_t count_max, bl_pidfds **out)
{
    bl_pidfds *pidfds = malloc(sizeof *pidfds + count_max * sizeof *pidfds->peers);
    *out = NULL;
    if (pidfds == NULL)
        return -ENOMEM;
    *pidfds = (bl_pidfds){.memory = memory, .count_max = count_max};
    strcpy(pidfds->directory, directory);
    for (uint32_t i = 0; i < count_max; i++)
        pidfds->peers[i] = (bl_pidfds_peer){.socket = -1, .pidfd = -1};
    pidfds->listener = -1;
    pidfds->epoll = epoll_create1(EPOLL_CLOEXEC);
    int status = pidfds->epoll < 0 ? -errno : 0;
    if (status == 0) {
        pidfds->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        status = pidfds->listener < 0 ? -errno : bl_pidfds_listen(pidfds, nonce);
    }
    if (status == 0)
        *out = pidfds;
    else
        bl_pidfds_close(pidfds);
    return bl_error_passes(-status) ? status : 0;
}

void bl_pidfds_close(bl_pidfds *pidfds)
{
    for (uint32_t i = 0; i < pidfds->count_max; i++) {
        if (pidfds->peers[i].socket >= 0)
            close(pidfds->peers[i].socket);
        if (pidfds->peers[i].pidfd >= 0)
            close(pidfds->peers[i].pidfd);
    }
    if (pidfds->listener >= 0)
        close(pidfds->listener);
    if (pidfds->epoll >= 0)
        close(pidfds->epoll);
    free(pidfds);
}

/* Accept connections. Returns 0, or a temporary -errno; then a process that has connected waits in
 * the listener's queue. */
static int bl_pidfds_accept(bl_pidfds *pidfds)
{
    int peer = accept4(pidfds->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    uint32_t place = 0;
    if (peer < 0)
        return bl_error_passes(errno) ? -errno : 0;
    while (place < pidfds->count_max && (pidfds->peers[place].socket >= 0 ||
                                         pidfds->peers[place].pidfd >= 0))
        place++;
    if (place == pidfds->count_max || bl_pidfds_watch(pidfds, peer, place) < 0)
        close(peer); /* the peer's lock file is enough */
    else
        pidfds->peers[place].socket = peer;
    return 0;
}

/* Get a pidfd of a connected process: from the kernel, or by its pid if the pid cannot have been
 * reused, which holds while the process that holds the liveness lock lives. Returns it, or
 * -errno. */
static int bl_pidfds_pidfd(const bl_pidfds *pidfds, int socket, uint64_t nonce)
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
    int liveness_lock = bl_liveness_watch(pidfds->memory, pidfds->directory, nonce);
    if (liveness_lock >= 0) {
        int gone = bl_liveness_gone(pidfds->memory, liveness_lock);
        bl_host_unlock(pidfds->memory, liveness_lock);
        if (!gone)
            return pidfd;
    }
    close(pidfd);
    return liveness_lock < 0 ? liveness_lock : -ESRCH;
}

static uint32_t bl_pidfds_peer_pid(int socket)
{
    struct ucred peer;
    socklen_t size = sizeof peer;
    int known = getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.pid > 0;
    return known ? (uint32_t)peer.pid : 0;
}

/* Read a peer's nonce. Returns 0, or a temporary -errno; then the peer's bytes wait in its
 * socket. */
static int bl_pidfds_meet(bl_pidfds *pidfds, uint32_t place)
{
    bl_pidfds_peer *peer = &pidfds->peers[place];
    uint64_t nonce = 0;
    ssize_t size = recv(peer->socket, &nonce, sizeof nonce, MSG_DONTWAIT | MSG_PEEK);
    if (size < 0 && errno == EAGAIN)
        return 0;
    int pidfd = size == sizeof nonce && nonce != 0 ? bl_pidfds_pidfd(pidfds, peer->socket, nonce)
                                                   : -EINVAL;
    if (pidfd >= 0 && bl_pidfds_watch(pidfds, pidfd, place) < 0) {
        int error = errno;
        close(pidfd);
        pidfd = -error;
    }
    if (bl_error_passes(-pidfd))
        return pidfd;
    peer->pid = bl_pidfds_peer_pid(peer->socket);
    bl_pidfds_drop(pidfds, &peer->socket);
    if (pidfd < 0)
        return 0;
    peer->nonce = nonce;
    peer->pidfd = pidfd;
    pidfds->count++;
    return 0;
}

/* The kernel reports ready descriptors in rotation, so a connection that has to wait hides no
 * death: the next call starts with the next event, and a death frees descriptors. */
uint64_t bl_pidfds_look(bl_pidfds *pidfds)
{
    struct epoll_event event;
    int status = 0;
    for (int i = 0; i < BL_PIDFDS_EVENTS && status == 0; i++) {
        if (epoll_wait(pidfds->epoll, &event, 1, 0) != 1)
            break;
        pidfds->waits = 0;
        uint32_t place = event.data.u32;
        if (place == BL_PIDFDS_LISTENER) {
            status = bl_pidfds_accept(pidfds);
        } else if (pidfds->peers[place].socket >= 0) {
            status = bl_pidfds_meet(pidfds, place);
        } else {
            uint64_t nonce = pidfds->peers[place].nonce;
            bl_pidfds_drop(pidfds, &pidfds->peers[place].pidfd);
            pidfds->count--;
            bl_crash_point("pidfds.ended");
            return nonce;
        }
        pidfds->waits = status < 0;
    }
    return 0;
}

int bl_pidfds_descriptor(const bl_pidfds *pidfds) { return pidfds->waits ? -1 : pidfds->epoll; }

void bl_pidfds_forget(bl_pidfds *pidfds, uint64_t nonce)
{
    for (uint32_t i = 0; i < pidfds->count_max; i++)
        if (pidfds->peers[i].pidfd >= 0 && pidfds->peers[i].nonce == nonce) {
            bl_pidfds_drop(pidfds, &pidfds->peers[i].pidfd);
            pidfds->count--;
        }
}

uint32_t bl_pidfds_pid(const bl_pidfds *pidfds, uint64_t nonce)
{
    for (uint32_t i = 0; i < pidfds->count_max; i++)
        if (pidfds->peers[i].pidfd >= 0 && pidfds->peers[i].nonce == nonce)
            return pidfds->peers[i].pid;
    return 0;
}

uint32_t bl_pidfds_count(const bl_pidfds *pidfds) { return pidfds->count; }

void bl_pidfds_show(const bl_memory *memory, const char *directory, uint64_t server_nonce,
                    uint64_t nonce)
{
    (void)memory;
    struct sockaddr_un address;
    int place = bl_pidfds_address(directory, server_nonce, &address);
    if (place < 0)
        return;
    int server = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (server >= 0 && connect(server, (struct sockaddr *)&address, sizeof address) == 0) {
        bl_crash_point("request.connected");
        (void)!send(server, &nonce, sizeof nonce, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    if (server >= 0)
        close(server);
    close(place);
}

#endif
