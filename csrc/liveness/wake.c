/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The word and the bell, as files: see liveness/wake.h. The word's page is allocated before it is
 * mapped: on a full disk, a store into a page without a block would be a SIGBUS.
 */
#include "liveness/wake.h"

#ifndef BL_SIM

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/host_atomic.h"
#include "liveness/lock.h"

struct bl_sleeper {
    uint64_t *word;
    int bell;
};

enum { BL_RINGS = 256 };        /* bytes of the bell that one read takes */

typedef struct bl_wake_path {
    char text[BL_PATH_SIZE + 32];
} bl_wake_path;

static bl_wake_path bl_wake_name(const char *directory, const char *kind, uint64_t nonce)
{
    bl_wake_path path;
    snprintf(path.text, sizeof path.text, "%.*s/%s-%016llx", BL_PATH_SIZE, directory, kind,
             (unsigned long long)nonce);
    return path;
}

/* Map the word of a server. Returns NULL and sets errno on failure. The mapping stays valid after
 * the descriptor is closed. */
static void *bl_wake_map(int descriptor, int protection)
{
    void *word = mmap(NULL, BL_PAGE_SIZE, protection, MAP_SHARED, descriptor, 0);
    return word == MAP_FAILED ? NULL : word;
}

/* Make the word's file and map it: 0 or -errno. The mode does not depend on the umask: the
 * directory limits who reaches the file. */
static int bl_sleeper_word(const char *directory, uint64_t nonce, bl_sleeper *sleeper)
{
    bl_wake_path path = bl_wake_name(directory, BL_LIVENESS_ASLEEP, nonce);
    int descriptor = open(path.text, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0640);
    if (descriptor < 0)
        return -errno;
    (void)!fchmod(descriptor, 0640);
    int error = posix_fallocate(descriptor, 0, BL_PAGE_SIZE);
    if (error == 0 &&
        (sleeper->word = bl_wake_map(descriptor, PROT_READ | PROT_WRITE)) == NULL)
        error = errno;
    close(descriptor);
    return -error;
}

/* Make the bell and open it: 0 or -errno. The server holds both ends, so poll() never reports a
 * hangup. */
static int bl_sleeper_bell(const char *directory, uint64_t nonce, bl_sleeper *sleeper)
{
    bl_wake_path path = bl_wake_name(directory, BL_LIVENESS_BELL, nonce);
    if (mkfifo(path.text, 0660) < 0 || chmod(path.text, 0660) < 0)
        return -errno;
    sleeper->bell = open(path.text, O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW);
    return sleeper->bell < 0 ? -errno : 0;
}

int bl_sleeper_open(const bl_memory *memory, const char *directory, uint64_t nonce,
                    bl_sleeper **out)
{
    (void)memory;
    bl_sleeper *sleeper = malloc(sizeof *sleeper);
    *out = NULL;
    if (sleeper == NULL)
        return -ENOMEM;
    *sleeper = (bl_sleeper){.bell = -1};
    int status = bl_sleeper_word(directory, nonce, sleeper);
    if (status == 0)
        status = bl_sleeper_bell(directory, nonce, sleeper);
    if (status == 0) {
        *out = sleeper;
        return 0;
    }
    bl_sleeper_close(sleeper);
    unlink(bl_wake_name(directory, BL_LIVENESS_ASLEEP, nonce).text);
    unlink(bl_wake_name(directory, BL_LIVENESS_BELL, nonce).text);
    return status == -ENOSPC || !bl_error_passes(-status) ? 0 : status;
}

void bl_sleeper_close(bl_sleeper *sleeper)
{
    if (sleeper->word != NULL)
        munmap(sleeper->word, BL_PAGE_SIZE);
    if (sleeper->bell >= 0)
        close(sleeper->bell);
    free(sleeper);
}

int bl_sleeper_announced(const bl_sleeper *sleeper) { return bl_host_load(sleeper->word) != 0; }

void bl_sleeper_announce(bl_sleeper *sleeper) { bl_host_store(sleeper->word, 1); }

void bl_sleeper_rise(bl_sleeper *sleeper)
{
    if (bl_sleeper_announced(sleeper)) /* a needless store costs the callers a cache miss */
        bl_host_store(sleeper->word, 0);
}

/* A ring after the read stays in the bell for the next wait. A ring before it came after its
 * request, which the next round finds. */
int bl_sleeper_wait(const bl_memory *memory, bl_sleeper *sleeper, int also, uint64_t ns)
{
    (void)memory;
    struct pollfd ready[] = {{.fd = sleeper->bell, .events = POLLIN},
                             {.fd = also, .events = POLLIN}};
    const struct timespec time = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    char rings[BL_RINGS];
    if (ppoll(ready, 2, &time, NULL) <= 0)
        return 0;
    if (ready[0].revents != 0)
        (void)!read(sleeper->bell, rings, sizeof rings);
    return 1;
}

void bl_sleeper_wake(const bl_sleeper *sleeper)
{
    bl_full_fence_now(); /* the change is visible before the word is read */
    if (bl_sleeper_announced(sleeper))
        (void)!write(sleeper->bell, "", 1);
}

void bl_waker_open(const bl_memory *memory, const char *directory, uint64_t nonce,
                   bl_waker *waker)
{
    (void)memory;
    if (waker->word != NULL && waker->nonce == nonce)
        return;
    bl_waker_close(waker);
    int descriptor = open(bl_wake_name(directory, BL_LIVENESS_ASLEEP, nonce).text,
                          O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (descriptor < 0)
        return;
    *waker = (bl_waker){bl_wake_map(descriptor, PROT_READ), nonce};
    close(descriptor);
}

void bl_waker_close(bl_waker *waker)
{
    if (waker->word != NULL)
        munmap((void *)(uintptr_t)waker->word, BL_PAGE_SIZE);
    waker->word = NULL;
}

/* The bell is opened for each ring, which is rare, so a session holds no descriptor. It is opened
 * for reading, too: otherwise a server that dies meanwhile would cause a SIGPIPE here. A full bell
 * needs no further ring. */
void bl_waker_ring(const char *directory, const bl_waker *waker)
{
    struct stat file;
    int bell = open(bl_wake_name(directory, BL_LIVENESS_BELL, waker->nonce).text,
                    O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW);
    if (bell < 0)
        return;
    if (fstat(bell, &file) == 0 && S_ISFIFO(file.st_mode))
        (void)!write(bell, "", 1);
    close(bell);
}

#endif
