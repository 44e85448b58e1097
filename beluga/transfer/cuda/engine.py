# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The CUDA engine moves blocks between GPU memory and the pool, on the caller's stream.

A plan whose windows are registered is one launch, or one for each few MiB if the CPU has to
maintain cache lines. The CPU does not wait; see :mod:`beluga.transfer.cuda.transfer`.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from beluga import config
from beluga._ffi import lib
from beluga.errors import LayoutError, TransferError, UnsettledError
from beluga.pool import STRIPE_SIZE, Pool
from beluga.transfer.cuda.device import CupyDriver
from beluga.transfer.cuda.driver import Driver, DriverError, StreamLike, stream_handle
from beluga.transfer.cuda.launch import Buffers, Launcher, select
from beluga.transfer.cuda.registration import (
    Claims,
    Hold,
    Registrar,
    WindowId,
    Windows,
    join,
    leave,
)
from beluga.transfer.cuda.transfer import (
    CapturedTransfer,
    CudaStat,
    CudaTransfer,
    DirectedStream,
    Part,
    Paths,
    PreparedLaunch,
    drain,
)
from beluga.transfer.engine import Direction, Parts, Prepared, keep_for_good
from beluga.transfer.plan import Plan
from beluga.transfer.policy import CacheMaintenance, flush_threads, probe


class CudaEngine:
    """An :class:`~beluga.transfer.engine.CopyEngine` for the memory of a GPU.

    Work goes to ``stream`` (a handle, or a stream of torch or cupy), or to the stream of a call.
    Without either it goes to the engine's own streams, where reads have the higher priority; they
    wait for no other stream, so source and target must not be in use.

    * ``blocks``: the number of the GPU's multiprocessors that a copy uses, twice as many with
      checksums.
    * ``window_size``: bytes per registration, a power of two of 2 MiB stripes.
    * ``cap``: bytes that all processes of this host may have registered together.
    * ``bounce_size``: bytes of buffers.
    * ``driver``: the driver of a GPU or of a stand-in; the caller closes it after the engine.

    Engines of one process for one pool and GPU share registered memory; the first of them sets
    ``window_size`` and ``cap``.

    Raises :class:`~beluga.errors.EngineUnavailableError` if there is no GPU or no cupy.
    """

    def __init__(  # noqa: PLR0913  all but two named
        self,
        pool: Pool,
        device: int = 0,
        stream: StreamLike | None = None,
        *,
        blocks: int = 4,
        window_size: int = 1 << 30,
        cap: int = 512 << 30,
        bounce_size: int = 64 << 20,
        driver: Driver | None = None,
        maintenance: CacheMaintenance | None = None,
    ) -> None:
        while window_size > STRIPE_SIZE and window_size // 2 >= pool.data_devices[0].size:
            window_size //= 2
        windows = Windows(pool, window_size)
        self._pool = pool
        self._own_driver = driver is None
        self._driver = driver or CupyDriver(device)
        self._driver.use()
        self._stream = None if stream is None else stream_handle(stream)
        self._own: dict[bool, int] = {}
        self._buffers = Buffers(self._driver)
        self._launcher = Launcher(self._driver, self._buffers, blocks=blocks)
        self._maintenance = maintenance or probe().maintenance("gpu", pool, flush_threads())

        def register() -> Registrar:
            claims = Claims(config.runtime_root() / "cuda-registered", cap)
            return Registrar(self._driver, pool, windows, claims)

        self._registrar = join(self._driver, pool, self, register)
        self._windows = self._registrar.windows
        self._paths = Paths(pool, self._launcher, self._windows, self._maintenance, bounce_size)
        self._captured: list[CapturedTransfer] = []
        pool.before_close(self.close)

    piece_size = 16 << 20
    """The least bytes that a link should admit at once: fewer take as long to start as to copy."""

    @property
    def name(self) -> str:
        return self._driver.name

    @property
    def stat(self) -> CudaStat:
        """The work so far; counts of windows include all engines that share them."""
        found = self._paths.stat
        found.launch_count = self._launcher.count
        found.registered_bytes, found.fault = self._registrar.size, self._registrar.fault
        found.unregistered_count = self._registrar.unregistered_count
        found.refused_count = self._registrar.refused_count
        return found

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until the pool is registered as far as possible; return False after the timeout."""
        return self._registrar.settle(timeout_s)

    def gather_write(self, plan: Plan, *, stream: StreamLike | None = None) -> CudaTransfer:
        """See :meth:`beluga.transfer.engine.CopyEngine.gather_write`."""
        plan.refuse_direction(write=True)
        return self._start(plan, self._stream_for(stream, write=True))

    def scatter_read(self, plan: Plan, *, stream: StreamLike | None = None) -> CudaTransfer:
        """See :meth:`beluga.transfer.engine.CopyEngine.scatter_read`."""
        plan.refuse_direction(write=False)
        return self._start(plan, self._stream_for(stream, write=False))

    def prepare(self, plan: Plan, direction: Direction) -> Prepared:
        """See :meth:`beluga.transfer.engine.CopyEngine`: if a kernel can copy the plan, it is
        described to the GPU now; else each range is a copy of its own."""
        write = direction is Direction.WRITE
        plan.refuse_direction(write=write)
        self._refuse(plan)
        self._driver.use()
        if len(plan.pieces) == 0:
            return Parts(self, plan, direction)
        directed = self._stream_for(None, write=write)
        touched = self._windows.touched(self._pool, plan)
        hold = self._registrar.hold(touched, self._driver)
        try:
            if touched - hold.addresses.keys():
                hold.started()
                return Parts(self, plan, direction)
            self._paths.begin()
            return PreparedLaunch(self._paths, plan, directed, hold)
        except BaseException:
            self._paths.undo(directed.stream)
            hold.started()
            raise

    def capture(self, plan: Plan, stream: StreamLike, *, write: bool) -> CapturedTransfer:
        """Put a copy into the graph that ``stream`` is being captured into.

        Raises :class:`~beluga.errors.TransferError` unless the stream is being captured and the
        pool's part is registered (:meth:`settle`).
        """
        handle = stream_handle(stream)
        if not self._driver.capturing(handle):
            raise TransferError("the stream is not being captured; do not use capture()")
        plan.refuse_direction(write=write)
        self._refuse(plan)
        if len(plan.pieces) == 0:
            raise LayoutError(
                "a plan without pieces cannot be captured; give it at least one piece"
            )
        self._registrar.keep(self._windows.touched(self._pool, plan), self)
        launch = self._paths.make(plan, write=write)
        self._launcher.run(launch, 0, len(launch.spans), stream=handle)
        transfer = CapturedTransfer(self._maintenance, launch)
        self._captured.append(transfer)
        return transfer

    def runs(self, plan: Plan) -> list[tuple[int, int, int]]:
        """Return the fewest runs in which copy engines can move a plan's bytes (for benchmarks).

        A run is a GPU address, an offset in the plan's concatenated chunks, and a length. All of
        the memory is registered, and stays registered.
        """
        self._registrar.keep(self._windows.touched(self._pool, plan), self)
        launch = self._paths.make(plan, write=False)
        starts, sizes = launch.spans["pool"].copy(), launch.spans["length"].astype(np.uint64)
        self._launcher.release(launch)
        window = np.searchsorted(np.sort(self._windows.bases, axis=None), starts, side="right")
        new = np.append(True, (starts[1:] != (starts + sizes)[:-1]) | (np.diff(window) != 0))
        first = np.flatnonzero(new)
        places = (np.cumsum(sizes) - sizes)[first]
        rows = zip(starts[first], places, np.add.reduceat(sizes, first), strict=True)
        return [(int(at), int(place), int(size)) for at, place, size in rows]

    def close(self) -> None:
        """See :meth:`beluga.transfer.engine.CopyEngine.close`. A second call does nothing."""
        if self._buffers.closed:
            return
        self._driver.use()  # any thread may close
        try:
            for stream in self._own.values():
                drain(self._driver, stream)
        except DriverError:  # copies may still run: keep windows and buffers
            keep_for_good(self)
            self._buffers.closed = True
            return
        leave(self._registrar, self)
        for stream in self._own.values():
            self._driver.end_stream(stream)
        for transfer in self._captured:
            self._launcher.release(transfer.launch)
        self._launcher.close()
        self._buffers.close()
        if self._own_driver:
            self._driver.close()

    def _stream_for(self, stream: StreamLike | None, *, write: bool) -> DirectedStream:
        if stream is not None:
            return DirectedStream(write, stream_handle(stream))
        if self._stream is not None:
            return DirectedStream(write, self._stream)
        if write not in self._own:
            self._own[write] = self._driver.make_stream(urgent=not write)
        return DirectedStream(write, self._own[write])

    def _start(self, plan: Plan, directed: DirectedStream) -> CudaTransfer:
        self._refuse(plan)
        self._driver.use()  # this may be a link's thread
        if self._driver.capturing(directed.stream):
            raise TransferError("the stream is being captured; use capture()")
        if len(plan.pieces) == 0:
            return CudaTransfer(self._launcher, [], lambda: None)
        touched = self._windows.touched(self._pool, plan)
        with self._registrar.hold(touched, self._driver) as hold:
            self._paths.begin()
            try:
                missing = touched - hold.addresses.keys()
                if missing:
                    return self._mixed(plan, directed, hold, missing)
                parts = self._paths.direct(plan, directed, hold)
                return CudaTransfer(self._launcher, parts, lambda: None)
            except BaseException:  # only this call has the parts in progress
                try:
                    self._paths.undo(directed.stream)
                except UnsettledError:
                    keep_for_good((self, plan))
                    raise
                raise

    def _refuse(self, plan: Plan) -> None:
        """Raise an error for an invalid plan, because a kernel's fault ends all GPU work of this
        process."""
        if self._buffers.closed:
            raise TransferError("the CUDA engine is closed")
        with self._pool.using() as pool:
            code = lib.bl_plan_check(pool, plan.struct())
        if code < 0:
            plan.refuse_beyond(self._pool.geometry.size)
            raise LayoutError("the plan's pieces are not of its chunks, or do not tile them")

    def _mixed(
        self, plan: Plan, directed: DirectedStream, hold: Hold, missing: set[WindowId]
    ) -> CudaTransfer:
        """Bounce the chunks in ``missing`` windows, and copy the others by the GPU."""
        ready = self._windows.reached(self._pool, plan, hold.addresses)
        parts: list[Part] = []
        pairs = []
        if ready.any():
            some = select(plan, ready)
            pairs.append((ready, some))
            parts += self._paths.direct(some, directed, hold)
        rest = select(plan, ~ready)
        pairs.append((~ready, rest))
        self._registrar.bounced(missing, rest.size)
        parts += self._paths.bounced(rest, directed)
        gather = functools.partial(_gather_sums, plan, pairs) if directed.write else lambda: None
        return CudaTransfer(self._launcher, parts, gather)


def _gather_sums(plan: Plan, pairs: list[tuple[NDArray[np.bool_], Plan]]) -> None:
    """Copy the checksums that parts of a plan computed into the plan."""
    for mask, some in pairs:
        if plan.checksums is not None and some.checksums is not None:
            plan.checksums[mask] = some.checksums
