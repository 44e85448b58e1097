# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""One engine's place at a link, and the thread that uses the engine (``csrc/iosched/port.c``)."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from beluga._ffi import ffi, lib
from beluga._shared import when_forked
from beluga.errors import BelugaError, TransferError, UnsettledError, raise_for_status
from beluga.transfer.engine import Direction, settle
from beluga.transfer.iosched.link import Link
from beluga.transfer.iosched.place import Place

if TYPE_CHECKING:
    from beluga.transfer.engine import Engine, Transfer
    from beluga.transfer.iosched.job import Job

_IDLE_NS = 1_000_000_000
_PAUSE_S = 0.1  # before a link that had no place is asked again
_NUMBER_BITS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class _Flight:
    """A piece that is being copied."""

    job: Job
    handle: int
    transfer: Transfer


class Port:
    """Jobs in, pieces out to the engine, in the link's order."""

    def __init__(self, link: Link, engine: Engine, depth: int) -> None:
        self.place = Place(link)
        self._handle = self.place.handle
        self._link, self._engine, self._depth = link, engine, depth
        self._numbers = itertools.count()
        self._jobs: dict[int, Job] = {}
        self._flying: deque[_Flight] = deque()
        self._dropped: deque[Job] = deque()
        self.closing = False
        self._life = threading.RLock()  # of the handle
        name = f"beluga-port-{link.name}-{engine.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        when_forked(self)

    def _forget(self) -> None:
        """In a forked child: the thread and the pieces are the parent's."""
        self._life = threading.RLock()
        self._handle = ffi.NULL
        self._jobs = {}

    def push(self, job: Job) -> None:
        """Put a job's pieces in line."""
        count = len(job.parts)
        if count == 0:
            return
        link, job.number = self._link, next(self._numbers)
        sizes = np.array([part.carried["length"].sum() for part in job.parts], np.uint64)
        devices = np.array([link.device_bytes(part) for part in job.parts], np.uint64)
        handles = ffi.new("uint64_t[]", count)
        self._jobs[job.number] = job
        status = lib.bl_port_push(
            self._handle,
            job.direction,
            job.kind,
            count,
            ffi.from_buffer("uint64_t[]", sizes),
            ffi.from_buffer("uint64_t[]", devices) if devices.size else ffi.NULL,
            job.number << _NUMBER_BITS,
            handles,
        )
        raise_for_status(status, "queueing a transfer")
        job.handles = list(handles)
        job.attach(self)

    def close(self) -> None:
        """Drop what waits and wait for what is under way."""
        self.closing = True
        for job in list(self._jobs.values()):
            job.cancel()
        with self._life:
            if self._handle:
                lib.bl_port_wake(self._handle)
        self._thread.join()
        with self._life:
            self.place.close()
            self._handle = ffi.NULL

    def withdraw(self, job: Job) -> int:
        """Take back the pieces of a job that wait; how many there were."""
        with self._life:
            if not self._handle:
                return 0
            cancel, handle = lib.bl_port_cancel, self._handle
            return sum(cancel(handle, job.direction, piece) == 0 for piece in job.handles)

    def drop(self, job: Job) -> None:
        """Cancel it soon, in the engine's thread."""
        self._dropped.append(job)
        with self._life:
            if self._handle:
                lib.bl_port_wake(self._handle)

    def forget(self, job: Job) -> None:
        """It has ended."""
        self._jobs.pop(job.number, None)

    # ---- the engine's thread

    def _run(self) -> None:
        admission = ffi.new("bl_admission *")
        while not (self.closing and not self._flying):
            while self._dropped:
                self._dropped.popleft().cancel()
            started = False
            if len(self._flying) < self._depth and not self.closing:
                idle_ns = 0 if self._flying else _IDLE_NS
                status = lib.bl_port_take(self._handle, idle_ns, admission)
                if status >= 0:
                    self._start(int(admission.id), int(admission.waiter))
                    started = True
                elif status != -errno.EAGAIN:
                    self._give_up(status)
            if self._flying and (not started or self._landed(self._flying[0])):
                self._land(self._flying.popleft())

    def _start(self, piece: int, handle: int) -> None:
        number, index = piece >> _NUMBER_BITS, piece & (1 << _NUMBER_BITS) - 1
        job = self._jobs[number]
        if not job.wanted():
            job.cancel()
            self._end(job, handle)
            return
        engine = self._engine
        copy = engine.scatter_read if job.direction == Direction.READ else engine.gather_write
        try:
            transfer = copy(job.parts[index])
        except BelugaError as error:
            self._end(job, handle, error)
        except Exception as error:
            self._end(job, handle, TransferError(f"{engine.name} failed: {error!r}"))
        else:
            self._flying.append(_Flight(job, handle, transfer))

    @staticmethod
    def _landed(flight: _Flight) -> bool:
        try:
            return flight.transfer.done()
        except Exception:  # its wait tells
            return True

    def _land(self, flight: _Flight) -> None:
        failed: BelugaError | None = None
        try:
            flight.transfer.wait()
        except BelugaError as error:
            failed = error
        except Exception as error:
            failed = TransferError(f"{self._engine.name} failed: {error!r}")
        try:
            settle([flight.transfer])  # a wait that failed has not seen its end, perhaps
        except UnsettledError as error:
            failed = error
        self._end(flight.job, flight.handle, failed)

    def _end(self, job: Job, handle: int, error: BelugaError | None = None) -> None:
        lib.bl_port_complete(self._handle, job.direction, handle)
        self.place.watch()
        if error is not None:
            job.fail(error)
        job.finish(1)

    def _give_up(self, status: int) -> None:
        """The link has no place for this engine (any more)."""
        try:
            raise_for_status(status, "waiting for the link")
        except (BelugaError, OSError) as error:
            for job in list(self._jobs.values()):
                job.fail(TransferError(str(error)))
            time.sleep(_PAUSE_S)
