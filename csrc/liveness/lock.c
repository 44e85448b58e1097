/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Liveness locks, as locks on files: see liveness/lock.h. A lock belongs to the open file, which a
 * forked child shares, so it is unlocked explicitly: closing our descriptor would leave it to the
 * child.
 */
#include "liveness/lock.h"

#ifndef BL_SIM

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "iosched/process.h"
#include "base/random.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434 /* Linux 5.3 */
#endif

enum { BL_STILLBORN_S = 10 };   /* no process takes this long from creating a file to locking it */

typedef struct bl_liveness_path {
    char text[BL_PATH_SIZE + 32];
} bl_liveness_path;

/* A file is created under a temporary name and renamed once its lock is held: a process that gets
 * the lock under the final name has proof that the holder is gone. */
#define BL_LIVENESS_NEW "new"
#define BL_LIVENESS_ALIVE "alive"

static bl_liveness_path bl_liveness_name(const char *directory, const char *kind, uint64_t nonce)
{
    bl_liveness_path path;
    snprintf(path.text, sizeof path.text, "%.*s/%s-%016llx", BL_PATH_SIZE, directory, kind,
             (unsigned long long)nonce);
    return path;
}

/* The directory's mode controls access, not this process's umask: other processes open the file to
 * lock it. Only the file's owner can set its mode, and no other process has to. */
static void bl_liveness_share(int descriptor) { (void)!fchmod(descriptor, 0660); }

static int bl_liveness_open(const char *directory, const char *kind, uint64_t nonce, int flags)
{
    bl_liveness_path path = bl_liveness_name(directory, kind, nonce);
    int descriptor = open(path.text, flags | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0660);
    if (descriptor < 0)
        return -errno;
    if (flags & O_CREAT)
        bl_liveness_share(descriptor);
    return descriptor;
}

int bl_liveness_hold(const bl_memory *memory, const char *directory, uint64_t nonce)
{
    (void)memory;
    bl_liveness_path made = bl_liveness_name(directory, BL_LIVENESS_NEW, nonce);
    bl_liveness_path path = bl_liveness_name(directory, BL_LIVENESS_ALIVE, nonce);
    int descriptor = bl_liveness_open(directory, BL_LIVENESS_NEW, nonce, O_CREAT | O_EXCL);
    if (descriptor < 0)
        return descriptor;
    if (flock(descriptor, LOCK_EX | LOCK_NB) == 0 && rename(made.text, path.text) == 0)
        return descriptor;
    int error = errno;
    close(descriptor);
    return -error;
}

int bl_liveness_known(const bl_memory *memory, const char *directory, uint64_t nonce)
{
    (void)memory;
    struct stat file;
    return stat(bl_liveness_name(directory, BL_LIVENESS_ALIVE, nonce).text, &file) == 0 ||
           errno != ENOENT;
}

int bl_liveness_watch(const bl_memory *memory, const char *directory, uint64_t nonce)
{
    (void)memory;
    return bl_liveness_open(directory, BL_LIVENESS_ALIVE, nonce, 0);
}

/* The content of the file of a session that has devices: its process, by a number that only
 * processes of its pid namespace can use. The file is trusted like its lock; the pool never holds a
 * pid. */
typedef struct bl_liveness_process {
    uint64_t pid_namespace;     /* 0: unknown, so the process cannot be queried */
    uint64_t pid;
} bl_liveness_process;

int bl_liveness_devices(const bl_memory *memory, int descriptor, int may_write)
{
    (void)memory;
    bl_liveness_process process = {bl_pid_namespace(), (uint64_t)getpid()};
    if (!may_write)
        return ftruncate(descriptor, 0) < 0 ? -errno : 0;
    ssize_t size = pwrite(descriptor, &process, sizeof process, 0);
    return size == sizeof process ? 0 : size < 0 ? -errno : -EIO;
}

int bl_liveness_has_devices(const bl_memory *memory, int descriptor)
{
    (void)memory;
    struct stat file;
    return fstat(descriptor, &file) < 0 || file.st_size > 0;
}

/* Return 1 if the process that has devices has ended. A process that can be waited for (its pidfd
 * is readable), or was, has passed exit_notify(), as its last thread. Each thread closes its files
 * before that, and runs the deferred work of closing them (exit_files() and exit_task_work() come
 * before exit_notify() in do_exit()). A driver's release of a device's file ends the device's work
 * for it. So the device is idle. This does not hold for a device's file that another process keeps
 * open: engines open theirs so that they are closed on exec, and no engine works in a forked child.
 *
 * If the pid has been reused, this function waits for the other process: the result is late but
 * never wrong. Without pidfd_open(), or where it is forbidden, the process counts as ended when it
 * has been waited for. A process of another pid namespace cannot be queried, and the pidfd that the
 * server got from the socket (liveness/pidfds.h) is the only proof. */
static int bl_liveness_process_ended(const bl_liveness_process *process)
{
    if (process->pid_namespace == 0 || process->pid_namespace != bl_pid_namespace())
        return 0;
    if (kill((pid_t)process->pid, 0) < 0 && errno == ESRCH)
        return 1;
    struct pollfd end = {.fd = (int)syscall(SYS_pidfd_open, (pid_t)process->pid, 0),
                         .events = POLLIN};
    if (end.fd < 0)
        return 0;
    int ended = poll(&end, 1, 0) == 1 && (end.revents & POLLIN) != 0;
    close(end.fd);
    return ended;
}

/* The lock comes first: the process that gets it reads the holder's last write to the file. */
int bl_liveness_gone(const bl_memory *memory, int descriptor)
{
    bl_liveness_process process;
    if (flock(descriptor, LOCK_EX | LOCK_NB) < 0)
        return 0;
    if (!bl_liveness_has_devices(memory, descriptor))
        return 1;
    return pread(descriptor, &process, sizeof process, 0) == sizeof process &&
           bl_liveness_process_ended(&process);
}

void bl_liveness_end(const bl_memory *memory, const char *directory, uint64_t nonce, int descriptor,
                     int remove)
{
    (void)memory;
    if (remove) {
        unlink(bl_liveness_name(directory, BL_LIVENESS_SOCKET, nonce).text);
        unlink(bl_liveness_name(directory, BL_LIVENESS_ASLEEP, nonce).text);
        unlink(bl_liveness_name(directory, BL_LIVENESS_BELL, nonce).text);
        /* last, because the sweep searches for this file */
        unlink(bl_liveness_name(directory, BL_LIVENESS_ALIVE, nonce).text);
    }
    if (descriptor >= 0)
        bl_host_unlock(memory, descriptor);
}

/* Remove the file of a process that died before it had the lock; the file's age decides. */
static void bl_liveness_stillborn(const char *directory, uint64_t nonce)
{
    bl_liveness_path path = bl_liveness_name(directory, BL_LIVENESS_NEW, nonce);
    struct stat file;
    if (stat(path.text, &file) == 0 && time(NULL) - file.st_ctim.tv_sec > BL_STILLBORN_S)
        unlink(path.text);
}

int bl_liveness_left(const bl_memory *memory, const char *directory, uint64_t *nonces,
                     uint32_t count_max)
{
    DIR *files = opendir(directory);
    uint32_t count = 0;
    if (files == NULL)
        return -errno;
    for (struct dirent *file; count < count_max && (file = readdir(files)) != NULL;) {
        unsigned long long nonce;
        char kind[8], end;
        if (sscanf(file->d_name, "%7[a-z]-%16llx%c", kind, &nonce, &end) != 2)
            continue;
        if (strcmp(kind, BL_LIVENESS_NEW) == 0)
            bl_liveness_stillborn(directory, nonce);
        if (strcmp(kind, BL_LIVENESS_ALIVE) != 0)
            continue;
        int descriptor = bl_liveness_watch(memory, directory, nonce);
        if (descriptor < 0)
            continue;
        if (bl_liveness_gone(memory, descriptor))
            nonces[count++] = nonce;
        bl_host_unlock(memory, descriptor);
    }
    closedir(files);
    return (int)count;
}

int bl_host_lock(const bl_memory *memory, const char *directory, const char *name)
{
    (void)memory;
    char path[BL_PATH_SIZE];
    int size = snprintf(path, sizeof path, "%s/%s", directory, name);
    if (size < 0 || (size_t)size >= sizeof path)
        return -ENAMETOOLONG;
    int descriptor = open(path, O_CREAT | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0660);
    if (descriptor < 0)
        return -errno;
    bl_liveness_share(descriptor);
    if (flock(descriptor, LOCK_EX | LOCK_NB) == 0)
        return descriptor;
    int error = errno == EWOULDBLOCK ? EAGAIN : errno;
    close(descriptor);
    return -error;
}

void bl_host_unlock(const bl_memory *memory, int descriptor)
{
    (void)memory;
    flock(descriptor, LOCK_UN);
    close(descriptor);
}

int bl_boot_id(const bl_memory *memory, uint64_t boot_id[2])
{
    (void)memory;
    char text[64] = {0}, hex[33] = {0};
    int descriptor = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (descriptor < 0)
        return -errno;
    ssize_t size = read(descriptor, text, sizeof text - 1);
    close(descriptor);
    int count = 0;
    for (ssize_t i = 0; i < size && count < 32; i++)
        if (text[i] != '-' && text[i] != '\n')
            hex[count++] = text[i];
    if (count != 32)
        return -EIO;
    boot_id[1] = strtoull(hex + 16, NULL, 16);
    hex[16] = 0;
    boot_id[0] = strtoull(hex, NULL, 16);
    return 0;
}

uint64_t bl_new_nonce(const bl_memory *memory)
{
    uint64_t nonce = 0;
    while (nonce == 0)
        if (bl_random(&nonce, sizeof nonce) < 0)
            nonce = bl_now_ns(memory) * 0x9e3779b97f4a7c15 ^ (uint64_t)getpid();
    return nonce;
}

#endif
