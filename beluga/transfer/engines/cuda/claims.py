# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Bound the total memory that the processes of this host register with the driver.

The driver keeps 16 bytes per 4 KiB page for each process that registers it, in kernel memory, and
registers for one process at a time, with locks that block the CUDA calls of other processes. So the
host has a cap, and processes take turns (they hold a lock while the driver works). Each process has
a file with the size of its claim. A claim counts while the file's lock is held; the kernel releases
the lock when the process ends. Another lock, which is held only briefly, guards the files.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


class Claims:
    """This process's share of ``cap`` bytes, kept in ``folder``."""

    def __init__(self, folder: Path, cap: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._cap = folder, cap
        self._path = folder / f"claim-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        with self._locked("book"):
            self._file: IO[str] = self._path.open("w+", encoding="ascii")
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._size = 0

    @contextmanager
    def claimed(self, size: int) -> Iterator[bool]:
        """Wait for this process's turn to register ``size`` bytes; yield False if the cap is
        reached.

        An exception in this context releases the claim.
        """
        with self._locked("turn"):
            with self._locked("book"):
                fits = self._others() + self._size + size <= self._cap
                if fits:
                    self._set(self._size + size)
            try:
                yield fits
            except BaseException:
                if fits:
                    self.give_back(size)
                raise

    def give_back(self, size: int) -> None:
        """Reduce the claim by ``size`` bytes that are not registered any more."""
        with self._locked("book"):
            self._set(self._size - size)

    def close(self) -> None:
        """End the claim, because this process has nothing registered any more."""
        with self._locked("book"):
            self._path.unlink(missing_ok=True)
            self._file.close()

    def _set(self, size: int) -> None:
        self._size = size
        self._file.seek(0)
        self._file.write(f"{size:20d}")
        self._file.flush()

    def _others(self) -> int:
        """Return the bytes that living processes claim, and remove the files of dead ones."""
        total = 0
        for path in self._folder.glob("claim-*"):
            if path == self._path:
                continue
            try:
                with path.open("r+", encoding="ascii") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
            except BlockingIOError:
                total += int(path.read_text(encoding="ascii") or 0)
            except FileNotFoundError:
                pass
        return total

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with (self._folder / name).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
