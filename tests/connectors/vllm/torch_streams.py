# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A fake of the parts of torch that staging needs, with streams that run as late as possible.

A stream does nothing until a caller waits for it, or for an event on it. So if a wait is missing,
the other stream's work comes too late, and the bytes show the wrong order.
"""

from __future__ import annotations

import threading
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np


class Stream:
    """A queue of operations, which run when a caller waits for them."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._lock = machine, threading.RLock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._before: list[Stream] = []
        self.put_count = self._done_count = 0

    def put(self, operation: Callable[[], None]) -> None:
        with self._lock:
            self._waiting.append(operation)
            self.put_count += 1

    def run_until(self, count: int) -> None:
        with self._lock:
            while self._done_count < count:
                self._waiting.popleft()()
                self._done_count += 1

    def wait_event(self, event: Event) -> None:
        self.put(event.wait)

    def synchronize(self) -> None:
        self.run_until(self.put_count)

    def __enter__(self) -> None:
        self._before.append(self._machine.current)
        self._machine.local.stream = self

    def __exit__(self, *_: object) -> None:
        self._machine.local.stream = self._before.pop()


class Event:
    """A point that the current stream must reach."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def record(self) -> None:
        self._stream = self._machine.current
        self._count = self._stream.put_count

    def wait(self) -> None:
        self._stream.run_until(self._count)


class Bytes:
    """A tensor of bytes. Its changes are put on the current stream."""

    def __init__(self, machine: Machine, array: Any) -> None:
        self._machine, self.array = machine, array
        self.shape = array.shape

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, key: Any) -> Bytes:
        return Bytes(self._machine, self.array[key])

    def view(self, *shape: int) -> Bytes:
        return Bytes(self._machine, self.array.reshape(shape))

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def set_(self, storage: Any) -> Bytes:
        return Bytes(self._machine, storage.array.reshape(-1).view(np.uint8))

    def as_strided(self, shape: Any, strides: Any, offset: int) -> Bytes:
        strided = np.lib.stride_tricks.as_strided(self.array[offset:], shape, strides)
        return Bytes(self._machine, strided)

    def index_select(self, axis: int, ids: Bytes) -> Bytes:
        assert axis == 0
        selected = np.empty((len(ids), *self.shape[1:]), np.uint8)
        self._machine.current.put(lambda: np.copyto(selected, self.array[ids.array]))
        return Bytes(self._machine, selected)

    def index_copy_(self, axis: int, ids: Bytes, source: Bytes) -> None:
        assert axis == 0
        self._machine.current.put(lambda: self.array.__setitem__(ids.array, source.array))

    def copy_(self, source: Bytes, *, non_blocking: bool) -> None:
        assert non_blocking
        self._machine.current.put(lambda: np.copyto(self.array, source.array))

    def to(self, _device: Any, *, non_blocking: bool) -> Bytes:
        assert non_blocking
        copied = Bytes(self._machine, np.empty(self.shape, np.uint8))
        copied.copy_(self, non_blocking=True)
        return copied


class Machine:
    """An accelerator with one stream on which the engine computes, and more on demand."""

    def __init__(self) -> None:
        self.local = threading.local()
        self.engine = Stream(self)

    @property
    def current(self) -> Stream:
        return getattr(self.local, "stream", self.engine)

    def module(self) -> Any:
        """Make the module that replaces ``torch``."""
        torch = types.ModuleType("torch")
        vars(torch).update(
            uint8=np.uint8,
            Stream=lambda _device: Stream(self),
            Event=lambda _device: Event(self),
            empty=lambda shape, **_: Bytes(self, np.zeros(shape, np.uint8)),
            as_tensor=lambda ids, **_: Bytes(self, np.array(ids)),
            accelerator=types.SimpleNamespace(current_stream=lambda _: self.current),
        )
        return torch
