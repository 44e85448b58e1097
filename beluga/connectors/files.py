# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Digests of files: every byte is hashed, on several threads, and once.

A file is cut into chunks, so that one large file keeps all threads busy: its digest is the SHA-256
of the digests of its chunks and its size. Digests are cached in a file of this user's cache
directory, by device, inode, size, mtime and ctime in nanoseconds. No program can set ctime, so a
file that was changed by a write is hashed again.

A write through a mapping changes the times only if the page was clean before. So the dirty pages
of a file are written back before its state is taken. File systems that never do this (tmpfs) or
that are not known to (images, FUSE) are not cached, and neither is a file that has just changed.
If the cache is missing, damaged, full, or writable by others, all files are hashed again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from beluga.config import cache_dir
from beluga.threads import Thread

CHUNK_BYTES = 16 << 20
READ_BYTES = 1 << 20
THREADS_MAX = 8
NICENESS = 10  # the engine's own threads come first
ENTRIES_MAX = 4096  # cached files; the oldest are dropped first
CACHE_BYTES_MAX = 4 << 20
LOCK_WAIT_S = 1800.0  # for another process of this user that hashes; afterwards both hash
LOCK_POLL_S = 0.05
# A change within the resolution of a file system's clock does not change the times.
SETTLED_NS = 2_000_000_000
LINKS_MAX = 40  # on the way to a file, as in Linux
# File systems on which a write to a clean page of a mapping changes a file's times.
CACHED_ON = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "nfs", "nfs4", "ceph", "lustre"}
MEMORY_ONLY = {"tmpfs", "ramfs", "hugetlbfs"}  # on which it never does

Hashed: TypeAlias = Callable[[int], None]
"""Called with the number of bytes that have been hashed since the last call, from any thread."""


class FileState(NamedTuple):
    """The state of a file, which differs after every change."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> FileState:
        """Return the state from a ``stat`` result."""
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)

    @property
    def key(self) -> str:
        """The key of the state in the cached digests."""
        return ":".join(map(str, self))


Signature: TypeAlias = "tuple[tuple[str, FileState], ...]"
"""The files of a folder, by their names in it, and their states: equal if nothing has changed."""


def signature(root: Path, counts: Callable[[str], bool], *, flush: bool = False) -> Signature:
    """Return the regular files of a folder, or of a single file, for whose relative name ``counts``
    is true. Links are followed. A single file has the name "". ``flush`` writes dirty pages back
    first. Raises OSError.
    """
    if not root.is_dir():
        return (("", _state(root, flush=flush)),)
    states: dict[str, FileState] = {}
    seen: set[tuple[int, int]] = set()
    folders = [root]
    while folders:
        folder = folders.pop()
        own = folder.stat()
        if (own.st_dev, own.st_ino) in seen:  # a link back to a folder above
            continue
        seen.add((own.st_dev, own.st_ino))
        for path in folder.iterdir():
            name = path.relative_to(root).as_posix()
            if not counts(name):
                continue
            mode = path.stat().st_mode
            if stat.S_ISDIR(mode):
                folders.append(path)
            elif stat.S_ISREG(mode):
                states[name] = _state(path, flush=flush)
    return tuple(sorted(states.items()))


def _state(path: Path, *, flush: bool) -> FileState:
    if not flush:
        return FileState.of(path.stat())
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        with contextlib.suppress(OSError):  # a read-only file system has no dirty pages
            os.fdatasync(fd)
        return FileState.of(os.fstat(fd))
    finally:
        os.close(fd)


def moved_since(path: Path, since_ns: int) -> Path | None:
    """Return a link or a folder on the way to ``path`` that was made, changed, or renamed after
    ``since_ns``, or None. Raises OSError.

    A path that led to another file then leads to files whose own times are old.
    """
    for step in _followed(path):
        status = step.lstat()
        # An entry that was added to a folder, or removed, changes both of its times; its own name
        # and parent change only one.
        entries = stat.S_ISDIR(status.st_mode) and status.st_ctime_ns == status.st_mtime_ns
        if status.st_ctime_ns > since_ns and not (stat.S_ISREG(status.st_mode) or entries):
            return step
    return None


def _followed(path: Path) -> Iterator[Path]:
    """Yield every folder, link and file that the kernel visits for a path."""
    names, links = deque(path.absolute().parts), 0
    folder = Path(names.popleft())
    while names:
        name = names.popleft()
        if name == "..":
            folder = folder.parent
            continue
        step = folder / name
        yield step
        if not step.is_symlink():
            folder = step
            continue
        links += 1
        if links > LINKS_MAX:
            raise OSError(errno.ELOOP, "too many links", str(path))
        target = step.readlink()
        if target.is_absolute():
            folder = Path(target.anchor)
            target = target.relative_to(folder)
        names.extendleft(reversed(target.parts))


class FileDigests:
    """Hashes files and caches their digests. Thread-safe."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cache_dir()
        self._file = self._folder / "files.json"

    def of(
        self, root: Path, files: Signature, *, hashed: Hashed = lambda _: None
    ) -> dict[str, str]:
        """Return the digest of each file of a signature, by name. Raises OSError, also for a file
        that is no longer in the state of the signature.
        """
        cached = self._cached() if _is_cacheable(root) else {}
        if any(state.key not in cached for _, state in files):
            with self._alone():
                # Another process may have hashed them meanwhile.
                cached = self._cached() if _is_cacheable(root) else {}
                missing = [(name, state) for name, state in files if state.key not in cached]
                before_ns = time.time_ns()
                new = _Hashing(root, missing, hashed).digests()
                cached |= new
                self._store(
                    {
                        state.key: new[state.key]
                        for name, state in missing
                        if _is_settled(state, before_ns) and _is_cacheable(root / name)
                    }
                )
        return {name: cached[state.key] for name, state in files}

    def _cached(self) -> dict[str, str]:
        """Return the cached digests, or none if the file cannot be trusted or read."""
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # not a pipe
            with open(os.open(self._file, flags), "rb") as stream:  # noqa: PTH123  a descriptor
                own = os.fstat(stream.fileno())
                others = own.st_uid != os.geteuid() or own.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
                if not stat.S_ISREG(own.st_mode) or others:
                    return {}
                entries = json.loads(stream.read(CACHE_BYTES_MAX))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(entries, dict):
            return {}
        return {key: value for key, value in entries.items() if _is_digest(value)}

    def _store(self, new: dict[str, str]) -> None:
        """Add digests and drop the oldest. Does nothing if the folder is not writable."""
        if not new:
            return
        entries = {key: value for key, value in self._cached().items() if key not in new} | new
        retained = dict(list(entries.items())[-ENTRIES_MAX:])
        with contextlib.suppress(OSError):
            fd, temporary = tempfile.mkstemp(dir=self._folder, prefix=".files-")
            try:
                with open(fd, "w") as stream:  # noqa: PTH123  a descriptor
                    json.dump(retained, stream)
                Path(temporary).replace(self._file)
            except BaseException:
                Path(temporary).unlink()
                raise

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclude other processes of this user, so that they do not hash the same files at the same
        time.
        """
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(self._folder / "files.lock", flags, 0o600)
                stack.callback(os.close, fd)
                deadline = time.monotonic() + LOCK_WAIT_S
                while time.monotonic() < deadline:
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        time.sleep(LOCK_POLL_S)
            yield


class _Hashing:
    """Hashes the chunks of files on threads that end with the process, however large the files."""

    def __init__(self, root: Path, files: Sequence[tuple[str, FileState]], hashed: Hashed) -> None:
        self._files = [(root / name if name else root, state) for name, state in files]
        self._hashed = hashed
        self._chunks = [
            (index, offset)
            for index, (_, state) in enumerate(self._files)
            for offset in range(0, max(state.size, 1), CHUNK_BYTES)
        ]
        self._digests: list[bytes] = [b""] * len(self._chunks)
        self._next = iter(range(len(self._chunks)))
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def digests(self) -> dict[str, str]:
        """Return the digest of each file, by the key of its state."""
        count = min(THREADS_MAX, len(os.sched_getaffinity(0)), len(self._chunks))
        threads = [
            Thread(target=self._work, name=f"beluga-hash-{i}", daemon=True) for i in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        joined = [hashlib.sha256(b"beluga file 1 %d\n" % state.size) for _, state in self._files]
        for (index, _), digest in zip(self._chunks, self._digests, strict=True):
            joined[index].update(digest)
        for path, state in self._files:  # no file may change while others are read
            _check(path, path.stat(), state)
        return {
            state.key: digest.hexdigest()
            for (_, state), digest in zip(self._files, joined, strict=True)
        }

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            while self._error is None:
                with self._lock:
                    number = next(self._next, None)
                if number is None:
                    return
                index, offset = self._chunks[number]
                self._digests[number] = self._chunk(*self._files[index], offset)
        except BaseException as error:  # the waiting thread raises it
            self._error = error

    def _chunk(self, path: Path, state: FileState, offset: int) -> bytes:
        digest, view = hashlib.sha256(), memoryview(bytearray(READ_BYTES))
        end = min(offset + CHUNK_BYTES, state.size)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(path, os.fstat(fd), state)
            while offset < end:
                count = os.preadv(fd, [view[: min(READ_BYTES, end - offset)]], offset)
                if count == 0:
                    raise OSError(f"{path} became shorter while it was read")
                digest.update(view[:count])
                offset += count
                self._hashed(count)
        finally:
            os.close(fd)
        return digest.digest()


def _check(path: Path, now: os.stat_result, state: FileState) -> None:
    if FileState.of(now) != state:
        raise OSError(f"{path} was changed while it was read")


def _is_settled(state: FileState, before_ns: int) -> bool:
    """Return whether a change since ``before_ns`` has changed the times. The clock may be a file
    server's. A ctime of whole seconds is not that of a change: the file system copies another time.
    """
    own = state.ctime_ns % 1_000_000_000 != 0
    return own and max(state.ctime_ns, state.mtime_ns) < before_ns - SETTLED_NS


def _is_cacheable(path: Path) -> bool:
    return filesystem_of(path) in CACHED_ON


def filesystem_of(path: Path) -> str:
    """Return the type of the file system of a path, or "" if it is not known."""
    real, mounts = Path(os.path.realpath(path)), dict[str, str]()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            mounts[before.split()[4].replace("\\040", " ")] = after.split()[0]
    return next((mounts[at] for at in map(str, (real, *real.parents)) if at in mounts), "")


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and not set(value) - set("0123456789abcdef")
