# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A driver without a GPU: it compiles the kernels' source for this CPU and runs them on threads.

Each stream has a thread, so work is as asynchronous as on a GPU. GPU memory is memory of this
process. Registered and pinned memory is mapped a second time: as on a GPU, it has another address
there, and a window that is not registered cannot be reached. Its speed does not represent a GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import mmap
import os
import platform
import queue
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from beluga import config
from beluga.errors import EngineUnavailableError
from beluga.threads import Thread
from beluga.transfer.cuda.driver import ROOT, DriverError, Grid, Pinned, digest, kernel_path

_OPTIONS = ("-x", "c++", "-std=c++17", "-Wall", "-Wextra", "-Wno-unknown-pragmas")
_MREMAP_MAYMOVE = 1
_FAILED = ctypes.c_void_p(-1).value

Work = Callable[[], None]


class _CGrid(ctypes.Structure):
    _fields_ = (("block_count", ctypes.c_uint32), ("thread_count", ctypes.c_uint32))


class _Mark:
    """One recording of an event, which is reached when its stream has executed the work before
    it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.error: Exception | None = None
        self.at_s = 0.0


class _Event:
    """An event: its last recording. Without one it counts as reached."""

    def __init__(self) -> None:
        self.last = _Mark()
        self.last.reached.set()


_Queue = queue.SimpleQueue["Work | _Mark | None"]


class _Stream:
    """A queue of work and a thread that executes it in order, until a failure."""

    def __init__(self) -> None:
        self.graph: list[Work] | None = None  # the graph that is being captured
        self._work: _Queue = queue.SimpleQueue()
        self._thread = Thread(
            target=_work_off, args=(self._work,), name="beluga-cuda-host", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._work.put, None)

    def put(self, work: Work) -> None:
        if self.graph is None:
            self._work.put(work)
        else:
            self.graph.append(work)

    def mark(self, event: _Event) -> None:
        event.last = _Mark()
        self._work.put(event.last)

    def end(self) -> None:
        self._work.put(None)
        self._thread.join()


def _work_off(work: _Queue) -> None:
    failed: Exception | None = None
    while (item := work.get()) is not None:
        if isinstance(item, _Mark):
            item.error, item.at_s = failed, time.perf_counter()
            item.reached.set()
        elif failed is None:
            try:
                item()
            except Exception as error:
                failed = error


class HostDriver:
    """A :class:`~beluga.transfer.cuda.driver.Driver` without a GPU.

    ``before_register`` is called with the size of each registration; an error that it raises
    becomes the driver's error (tests). ``launches`` lists the kernels that were launched. Raises
    :class:`~beluga.errors.EngineUnavailableError` if the kernels cannot be compiled.
    """

    name = "cuda-host"
    identity = "host"

    def __init__(self, *, before_register: Callable[[int], None] | None = None) -> None:
        self.launches: list[str] = []
        self.before_register = before_register
        self._kernels = ctypes.CDLL(str(_library()))
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mremap.restype = ctypes.c_void_p
        self._maps: dict[int, mmap.mmap] = {}
        self._pinned: dict[int, tuple[int, int]] = {}  # aliases, by the CPU's address
        self._registered: dict[int, tuple[int, int]] = {}
        self._handles = itertools.count(1)
        self._events: dict[int, _Event] = {}
        self._streams: dict[int, _Stream] = {0: _Stream()}

    def use(self) -> None:
        pass

    def allocate(self, size: int) -> int:
        memory, address = _map(size)
        self._maps[address] = memory
        return address

    def free(self, address: int) -> None:
        del self._maps[address]

    def pin(self, size: int) -> Pinned:
        memory, address = _map(size)
        self._maps[address] = memory
        alias = self._pinned[address] = self._alias(address, size)
        return Pinned(np.frombuffer(memory, np.uint8), alias[0])

    def unpin(self, pinned: Pinned) -> None:
        address = pinned.array.ctypes.data
        self._end_alias(self._pinned.pop(address))
        del self._maps[address]

    def register(self, address: int, size: int) -> int:
        if self.before_register is not None:
            self.before_register(size)
        if address in self._registered:
            raise DriverError(f"{address:#x} is registered already")
        alias = self._registered[address] = self._alias(address, size)
        return alias[0]

    def unregister(self, address: int) -> None:
        self._end_alias(self._registered.pop(address))

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        self._streams[stream].put(lambda: self._run(ctypes.memmove, target, source, size))

    def launch(self, kernel: str, grid: Grid, job: NDArray[np.void], stream: int) -> None:
        run, arguments = getattr(self._kernels, kernel), job.tobytes()
        shape = _CGrid(grid.blocks, grid.threads)
        self.launches.append(kernel)
        # The work refers to this driver, whose memory it uses, until it has run
        self._streams[stream].put(lambda: self._run(run, arguments, shape, None))

    def _run(self, function: Callable[..., object], *arguments: object) -> None:
        function(*arguments)

    def make_stream(self, *, urgent: bool) -> int:
        del urgent  # threads have no priorities here
        handle = next(self._handles)
        self._streams[handle] = _Stream()
        return handle

    def end_stream(self, stream: int) -> None:
        self._streams.pop(stream).end()

    def capturing(self, stream: int) -> bool:
        return self._streams[stream].graph is not None

    def make_event(self) -> int:
        handle = next(self._handles)
        self._events[handle] = _Event()
        return handle

    def free_event(self, event: int) -> None:
        del self._events[event]

    def record(self, event: int, stream: int) -> None:
        if self.capturing(stream):
            raise DriverError("an event of another stream's is recorded on a capturing stream")
        self._streams[stream].mark(self._events[event])

    def follow(self, stream: int, event: int) -> None:
        mark = self._events[event].last

        def stand() -> None:
            mark.reached.wait()
            if mark.error is not None:
                raise mark.error

        self._streams[stream].put(stand)

    def ended(self, event: int) -> bool:
        last = self._events[event].last
        if not last.reached.is_set():
            return False
        if last.error is not None:
            raise DriverError(f"a kernel or a copy failed: {last.error}")
        return True

    def wait(self, event: int) -> None:
        self._events[event].last.reached.wait()
        self.ended(event)

    def elapsed_s(self, first: int, second: int) -> float:
        return self._events[second].last.at_s - self._events[first].last.at_s

    def close(self) -> None:
        for stream in self._streams.values():
            stream.end()
        self._streams.clear()
        for alias in self._pinned.values():
            self._end_alias(alias)
        self._pinned.clear()
        self._maps.clear()

    def _alias(self, address: int, size: int) -> tuple[int, int]:
        """Map the shared pages there a second time. Return the address and the size."""
        alias = self._libc.mremap(
            ctypes.c_void_p(address), ctypes.c_size_t(0), ctypes.c_size_t(size), _MREMAP_MAYMOVE
        )
        if alias in (None, _FAILED):
            raise DriverError(f"registering {size} bytes: {os.strerror(ctypes.get_errno())}")
        return int(alias), size

    def _end_alias(self, alias: tuple[int, int]) -> None:
        self._libc.munmap(ctypes.c_void_p(alias[0]), ctypes.c_size_t(alias[1]))


def _map(size: int) -> tuple[mmap.mmap, int]:
    memory = mmap.mmap(-1, size)
    return memory, np.frombuffer(memory, np.uint8).ctypes.data


def _library() -> Path:
    """Return the kernels' library for this CPU, compiled once and kept in the user's cache."""
    kernels = kernel_path()
    # Machines of several architectures may share a home directory.
    inputs = " ".join((platform.machine(), digest(), *_OPTIONS))
    name = hashlib.sha256(inputs.encode()).hexdigest()[:16]
    target = config.cache_dir() / f"kernels-{name}.so"
    if not target.exists():
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            draft = Path(folder) / target.name
            compile_host(kernels, draft, "-O2", "-shared", "-fPIC")
            draft.replace(target)
    return target


def compile_host(source: Path, target: Path, *flags: str) -> None:
    """Compile a source for this CPU. Raises :class:`~beluga.errors.EngineUnavailableError`."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise EngineUnavailableError("there is no C++ compiler here (g++) to build the kernels")
    include = (f"-I{ROOT}", f"-I{ROOT / 'cuda'}")
    command = [compiler, *_OPTIONS, *flags, *include, str(source), "-o", str(target)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        first = next(iter(completed.stderr.splitlines()), "no message")
        raise EngineUnavailableError(f"{compiler} cannot build the kernels: {first}")
