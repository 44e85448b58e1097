# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Digests of files: every byte is hashed, on several threads, and once.

A file is cut into pieces, so that one large file keeps all threads busy: its digest is the SHA-256
of the digests of its pieces and its size. Digests are cached in a file of this user's cache
directory, by device, inode, size, and the times of the last change of contents and of metadata, in
nanoseconds. No program can set the last one (ctime), so a file that was changed in any way is
hashed again. If the cache is missing, damaged, full, or writable by others, the files are hashed
again; so are the files of file systems without a ctime of their own (images such as squashfs, and
stores behind FUSE), of which two may have equal numbers and times for different bytes.
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
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from beluga.config import cache_dir
from beluga.threads import Thread

PIECE = 16 << 20
READ = 1 << 20
THREADS_MAX = 8
NICENESS = 10  # the engine's own threads come first
ENTRIES_MAX = 4096  # cached files; the oldest are dropped first
MEMORY_BYTES_MAX = 4 << 20
LOCK_WAIT_S = 1800.0  # for another process of this user that hashes; afterwards both hash
LOCK_POLL_S = 0.05
# A change within the resolution of a file system's clock does not change the times.
SETTLED_NS = 2_000_000_000
SECOND_NS = 1_000_000_000
LINKS_MAX = 40  # on the way to a file, as in Linux

Hashed: TypeAlias = Callable[[int], None]
"""Called with the number of bytes that have been hashed since the last call, from any thread."""


@dataclass(frozen=True, slots=True)
class FileState:
    """The state of a file, which differs after every change."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileState:
        """Return the state from a ``stat`` result."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def key(self) -> str:
        """The key of the state in the cached digests."""
        return ":".join(
            map(str, (self.device, self.inode, self.size, self.mtime_ns, self.ctime_ns))
        )


Signature: TypeAlias = "tuple[tuple[str, FileState], ...]"
"""The files of a folder, by their names in it, and their states: equal if nothing has changed."""


def signature(root: Path, counts: Callable[[str], bool]) -> Signature:
    """Return the regular files of a folder, or of a single file, for whose relative name ``counts``
    is true. Links are followed. A single file has the name "". Raises OSError.
    """
    if not root.is_dir():
        return (("", FileState.of(root.stat())),)
    found: list[tuple[str, FileState]] = []
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
            state = path.stat()
            if stat.S_ISDIR(state.st_mode):
                folders.append(path)
            elif stat.S_ISREG(state.st_mode):
                found.append((name, FileState.of(state)))
    return tuple(sorted(found, key=lambda one: one[0]))


def moved_since(path: Path, since_ns: int) -> Path | None:
    """Return a link or a folder on the way to ``path`` that was made, changed, or renamed after
    ``since_ns``, or None. Raises OSError.

    A path that led to another file then leads to files whose own times are old.
    """
    for one in _followed(path):
        found = one.lstat()
        if found.st_ctime_ns <= since_ns:
            continue
        # An entry that was added to a folder, or removed, changes both of its times; its own name
        # and place change only one.
        entries = stat.S_ISDIR(found.st_mode) and found.st_ctime_ns == found.st_mtime_ns
        if not (stat.S_ISREG(found.st_mode) or entries):
            return one
    return None


def _followed(path: Path) -> Iterator[Path]:
    """Yield every folder, link and file that the kernel visits for a path."""
    rest, links = deque(path.absolute().parts), 0
    here = Path(rest.popleft())
    while rest:
        part = rest.popleft()
        if part == "..":
            here = here.parent
            continue
        one = here / part
        yield one
        if not one.is_symlink():
            here = one
            continue
        links += 1
        if links > LINKS_MAX:
            raise OSError(errno.ELOOP, "too many links", str(path))
        target = one.readlink()
        parts = target.parts
        if target.is_absolute():
            here, parts = Path(parts[0]), parts[1:]
        rest.extendleft(reversed(parts))


class FileDigests:
    """Hashes files and caches their digests. Thread-safe."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cache_dir()

    def of(
        self, root: Path, files: Signature, *, hashed: Hashed = lambda _: None
    ) -> dict[str, str]:
        """Return the digest of each file of a signature, by name. Raises OSError, also for a file
        that is no longer in the state of the signature.
        """
        found = self._remembered()
        if all(state.key in found for _, state in files):
            return {name: found[state.key] for name, state in files}
        with self._alone():
            found = self._remembered()  # another process may have hashed them meanwhile
            missing = [(name, state) for name, state in files if state.key not in found]
            new = _Hashing(root, missing, hashed).digests()
            self._remember({state.key: new[state.key] for _, state in missing if _settled(state)})
        found |= new
        return {name: found[state.key] for name, state in files}

    @property
    def _file(self) -> Path:
        return self._folder / "files.json"

    def _remembered(self) -> dict[str, str]:
        """Return the cached digests, or none if the file cannot be trusted or read."""
        try:
            fd = os.open(self._file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return {}
        try:
            with open(fd, "rb") as stream:  # noqa: PTH123  a descriptor
                own = os.fstat(fd)
                if not stat.S_ISREG(own.st_mode) or not _private(own):
                    return {}
                entries = json.loads(stream.read(MEMORY_BYTES_MAX))
        except (OSError, ValueError):
            return {}
        if not isinstance(entries, dict):
            return {}
        return {key: one for key, one in entries.items() if _is_digest(one)}

    def _remember(self, new: dict[str, str]) -> None:
        """Add digests and drop the oldest. Does nothing if the folder is not writable."""
        if not new:
            return
        entries = self._remembered()
        entries = {key: one for key, one in entries.items() if key not in new} | new
        kept = dict(list(entries.items())[-ENTRIES_MAX:])
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd, made = tempfile.mkstemp(dir=self._folder, prefix=".files-")
            try:
                with open(fd, "w") as stream:  # noqa: PTH123  a descriptor
                    json.dump(kept, stream)
                Path(made).replace(self._file)
            except BaseException:
                Path(made).unlink()
                raise

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclude other processes of this user, so that they do not hash the same files at the same
        time.
        """
        fd = -1
        try:
            with contextlib.suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                name = self._folder / "files.lock"
                fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                deadline = time.monotonic() + LOCK_WAIT_S
                while time.monotonic() < deadline:
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        time.sleep(LOCK_POLL_S)
            yield
        finally:
            if fd >= 0:
                os.close(fd)


class _Hashing:
    """Hashes the pieces of files on threads that end with the process, however large the files."""

    def __init__(self, root: Path, files: Sequence[tuple[str, FileState]], hashed: Hashed) -> None:
        self._files = [(root / name if name else root, state) for name, state in files]
        self._hashed = hashed
        self._pieces = [
            (at, place)
            for at, (_, state) in enumerate(self._files)
            for place in range(0, max(state.size, 1), PIECE)
        ]
        self._found: list[bytes] = [b""] * len(self._pieces)
        self._next = 0
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def digests(self) -> dict[str, str]:
        """Return the digest of each file, by the key of its state."""
        count = min(THREADS_MAX, len(os.sched_getaffinity(0)), len(self._pieces))
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
        for (at, _), digest in zip(self._pieces, self._found, strict=True):
            joined[at].update(digest)
        for path, state in self._files:  # no file may change while others are read
            _check(path, path.stat(), state)
        return {
            state.key: one.hexdigest() for (_, state), one in zip(self._files, joined, strict=True)
        }

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            while True:
                with self._lock:
                    number = self._next
                    if number >= len(self._pieces) or self._error is not None:
                        return
                    self._next += 1
                at, place = self._pieces[number]
                self._found[number] = self._piece(*self._files[at], place)
        except BaseException as error:  # the waiting thread raises it
            self._error = error

    def _piece(self, path: Path, state: FileState, place: int) -> bytes:
        digest, view = hashlib.sha256(), memoryview(bytearray(READ))
        end = min(place + PIECE, state.size)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(path, os.fstat(fd), state)
            while place < end:
                count = os.preadv(fd, [view[: min(READ, end - place)]], place)
                if count == 0:
                    raise OSError(f"{path} became shorter while it was read")
                digest.update(view[:count])
                place += count
                self._hashed(count)
        finally:
            os.close(fd)
        return digest.digest()


def _check(path: Path, found: os.stat_result, state: FileState) -> None:
    if FileState.of(found) != state:
        raise OSError(f"{path} was changed while it was read")


def _settled(state: FileState) -> bool:
    """Return whether a later change would change the times. The clock may be a file server's. A
    ctime of whole seconds is not that of a change: the file system copies another time.
    """
    own = state.ctime_ns % SECOND_NS != 0
    return own and max(state.ctime_ns, state.mtime_ns) < time.time_ns() - SETTLED_NS


def _private(found: os.stat_result) -> bool:
    """Return whether only this user can write the file."""
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and not set(value) - set("0123456789abcdef")
