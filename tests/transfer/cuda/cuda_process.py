# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Runs the kernels in a process with sanitizers (``tests/native/cuda_harness.cu``), over pipes."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beluga.transfer.cuda import driver as source
from beluga.transfer.cuda.driver import Pinned

ACCESS = np.dtype(
    [("address", "<u8"), ("thread", "<u4"), ("span", "<u4"), ("size", "<u4"), ("store", "<u4")]
)
SANITIZE = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# The order of bl_kernels in the harness.
KERNELS = source.KERNELS
BUGS = ("shift", "swap", "tail", "sum", "twice", "strided", "pad", "again")


class SanitizerError(Exception):
    """The sanitizer ended the process; the error has its report."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """The grid of a launch, smaller than the engine's because the sanitizers are slow."""

    blocks: int
    threads: int


@functools.cache
def _fixed_addresses() -> tuple[str, ...]:
    """Return the command that starts a program at fixed addresses.

    Some Linux kernels randomize addresses so widely that the sanitizer's shadow memory does not
    fit.
    """
    command = ("setarch", "-R")
    if shutil.which(command[0]) is None:
        return ()
    allowed = subprocess.run([*command, "true"], capture_output=True, check=False)
    return command if allowed.returncode == 0 else ()


class KernelProcess:
    """The memory and kernels of a process that ends at the first bad access."""

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen(
            [*_fixed_addresses(), program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0:color=never"},
        )

    def allocate(self, size: int, ragged: int = 0) -> int:
        """Allocate exactly ``size`` bytes, ``ragged`` bytes after an aligned address."""
        return self._number(self._call("A", size, ragged, answer=8))

    def write(self, address: int, content: bytes) -> None:
        self._call("W", address, len(content), payload=content)

    def read(self, address: int, size: int) -> bytes:
        return self._call("R", address, size, answer=size)

    def launch(self, kernel: str, grid: Grid, job: NDArray[Any]) -> NDArray[Any]:
        """Run a kernel. Return every access to pool and engine memory, of type ACCESS."""
        number = KERNELS.index(kernel)
        answer = self._call("L", number, grid.blocks, grid.threads, payload=job.tobytes(), answer=8)
        count = self._number(answer)
        return np.frombuffer(self._take(count * ACCESS.itemsize), ACCESS)

    def plant(self, bug: str | None) -> None:
        self._call("B", 0 if bug is None else BUGS.index(bug) + 1)

    def free(self) -> None:
        self._call("F")

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _call(self, letter: str, *numbers: int, payload: bytes = b"", answer: int = 0) -> bytes:
        request = struct.pack("<4Q", ord(letter), *numbers, *[0] * (3 - len(numbers)))
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request + payload)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its last output is read below
        return self._take(answer)

    def _take(self, size: int) -> bytes:
        assert self._process.stdout is not None
        answer = self._process.stdout.read(size)
        if len(answer) < size:
            assert self._process.stderr is not None
            raise SanitizerError(self._process.stderr.read().decode(errors="replace"))
        return answer

    @staticmethod
    def _number(answer: bytes) -> int:
        return int.from_bytes(answer, "little")


class ProcessDriver:
    """A driver whose GPU is a kernel process, with the functions that a launcher needs. Launches
    have ``grid``, and return when they have ended; ``accesses`` are those of the last one.
    """

    def __init__(self, process: KernelProcess, grid: Grid) -> None:
        self._process, self._grid = process, grid
        self._pinned: list[Pinned] = []
        self.kernel = ""
        self.accesses = np.empty(0, ACCESS)

    def allocate(self, size: int) -> int:
        return self._process.allocate(size)

    def pin(self, size: int) -> Pinned:
        pinned = Pinned(np.zeros(size, np.uint8), self._process.allocate(size))
        self._pinned.append(pinned)
        return pinned

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        self._process.write(target, ctypes.string_at(source, size))

    def launch(self, kernel: str, grid: object, job: NDArray[Any], stream: int) -> None:
        for pinned in self._pinned:
            self._process.write(pinned.address, pinned.array.tobytes())
        self.kernel = kernel
        self.accesses = self._process.launch(kernel, self._grid, job)
        for pinned in self._pinned:
            content = self._process.read(pinned.address, len(pinned.array))
            pinned.array[:] = np.frombuffer(content, np.uint8)

    def make_stream(self, *, urgent: bool) -> int:
        return 0

    def end_stream(self, stream: int) -> None: ...

    def make_event(self) -> int:
        return 0

    def free_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None: ...

    def wait(self, event: int) -> None: ...
