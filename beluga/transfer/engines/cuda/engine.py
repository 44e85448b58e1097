# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The CUDA engine moves blocks between GPU memory and the pool, on the caller's stream.

A plan whose windows are registered is one launch (direct), or a launch and a few large copies
(staged), and the CPU does not wait; see :mod:`beluga.transfer.engines.cuda.paths`.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from beluga import config
from beluga._ffi import lib
from beluga.errors import LayoutError, TransferError, UnsettledError
from beluga.pool import STRIPE_SIZE, Pool
from beluga.transfer.engine import Direction, Parts, Prepared, keep_for_good
from beluga.transfer.engines.cuda import shared
from beluga.transfer.engines.cuda.buffers import Buffers
from beluga.transfer.engines.cuda.calibration import Calibration
from beluga.transfer.engines.cuda.capture import CapturedTransfer
from beluga.transfer.engines.cuda.claims import Claims
from beluga.transfer.engines.cuda.device import CupyDriver
from beluga.transfer.engines.cuda.driver import Driver, DriverError
from beluga.transfer.engines.cuda.holds import Hold, WindowId
from beluga.transfer.engines.cuda.interop import StreamLike, stream_handle
from beluga.transfer.engines.cuda.launch import Launcher
from beluga.transfer.engines.cuda.parts import select
from beluga.transfer.engines.cuda.paths import CudaStat, Paths
from beluga.transfer.engines.cuda.prepared import PreparedLaunch
from beluga.transfer.engines.cuda.registrar import Registrar
from beluga.transfer.engines.cuda.staged import DirectedStream, drain
from beluga.transfer.engines.cuda.tables import Tables, make_tables
from beluga.transfer.engines.cuda.transfer import CudaTransfer, Part
from beluga.transfer.engines.cuda.windows import Windows
from beluga.transfer.engines.policy import CacheMaintenance, probe
from beluga.transfer.plan.plan import Plan

PATHS = ("auto", "direct", "staged")


class CudaEngine:
    """An :class:`~beluga.transfer.engine.CopyEngine` for the memory of a GPU.

    Work goes to ``stream`` (a handle, or a stream of torch or cupy), or to the stream of a call.
    Without either it goes to the engine's own streams, where reads have the higher priority; they
    wait for no other stream, so source and target must not be in use.

    * ``path``: ``direct`` or ``staged``; ``auto`` takes the path that measured faster.
    * ``blocks``: the number of the GPU's multiprocessors that a copy may use.
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
        path: str = "auto",
        blocks: int = 4,
        window_size: int = 1 << 30,
        cap: int = 512 << 30,
        bounce_size: int = 64 << 20,
        driver: Driver | None = None,
        maintenance: CacheMaintenance | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        if path not in PATHS:
            raise ValueError(f"path is {' or '.join(PATHS)}, not {path!r}")
        while window_size > STRIPE_SIZE and window_size // 2 >= pool.devices[0].size:
            window_size //= 2
        windows = Windows.of(pool, window_size)
        self._pool, self._path = pool, path
        self._own_driver = driver is None
        self._driver = driver or CupyDriver(device)
        self._driver.use()
        self._stream = None if stream is None else stream_handle(stream)
        self._own: dict[bool, int] = {}
        self._buffers = Buffers(self._driver)
        self._launcher = Launcher(self._driver, self._buffers, blocks=blocks)
        self._calibration = calibration or Calibration.of(self._launcher, pool)
        self._maintenance = maintenance or probe().maintenance("gpu", pool)

        def register() -> Registrar:
            claims = Claims(config.runtime_root() / "cuda-registered", cap)
            return Registrar(self._driver, pool, windows, claims)

        self._registrar = shared.join(self._driver, pool, self, register)
        self._windows = self._registrar.windows
        self._paths = Paths(pool, self._launcher, self._windows, self._maintenance, bounce_size)
        self._captured: list[CapturedTransfer] = []
        pool.before_close(self.close)

    piece_size = 4 << 20
    """The least bytes that a link should admit at once: fewer take as long to start as to copy."""

    @property
    def name(self) -> str:
        return self._driver.name + ("" if self._path == "auto" else f"-{self._path}")

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
        """See :meth:`beluga.transfer.engine.CopyEngine`: if one kernel can copy the plan, its
        tables go to the GPU now; else each range is a copy of its own."""
        write = direction is Direction.WRITE
        plan.refuse_direction(write=write)
        self._refuse(plan)
        self._driver.use()
        if len(plan.pieces) == 0:
            return Parts(self, plan, direction)
        directed, tables = self._stream_for(None, write=write), make_tables(plan, write=write)
        touched = self._windows.touched(tables.pieces["offset"])
        hold = self._registrar.hold(touched, self._driver)
        try:
            if touched - hold.addresses.keys() or self._stages(plan, directed, hold):
                hold.started()
                return Parts(self, plan, direction)
            self._paths.begin()
            return PreparedLaunch(self._paths, plan, tables, directed, hold)
        except BaseException:
            self._paths.undo(directed.stream)
            hold.started()
            raise

    def capture(self, plan: Plan, stream: StreamLike, *, write: bool) -> CapturedTransfer:
        """Put a copy into the graph that ``stream`` is being captured into.

        Raises :class:`~beluga.errors.TransferError` unless the pool's part is registered and the
        same copy has run and ended before, because nothing can be allocated or registered while a
        stream is captured.
        """
        handle = stream_handle(stream)
        if not self._driver.capturing(handle):
            raise TransferError("the stream is not being captured; do not use capture()")
        plan.refuse_direction(write=write)
        self._refuse(plan)
        if len(plan.pieces) == 0:
            raise LayoutError("a plan without pieces is nothing to be captured")
        tables = make_tables(plan, write=write)
        offsets = tables.pieces["offset"]
        bases = self._paths.bases(
            offsets, self._registrar.keep(self._windows.touched(offsets), self)
        )
        with self._buffers.only_free():
            launched = self._launcher.launch(tables, bases, write=write, stream=handle)
        transfer = CapturedTransfer(plan, self._maintenance, launched, write=write)
        self._captured.append(transfer)
        return transfer

    def runs(self, plan: Plan) -> list[tuple[int, int, int]]:
        """Return the fewest runs in which copy engines can move a plan's bytes (for benchmarks).

        A run is a GPU address, an offset in the plan's concatenated chunks, and a length. All of
        the memory is registered, and stays registered.
        """
        edges = np.concatenate([plan.chunks["offset"], plan.pieces["offset"]])
        addresses = self._registrar.keep(self._windows.touched(edges), self)
        found: list[tuple[int, int, int]] = self._paths.gpu_runs(plan, addresses).tolist()
        return found

    def close(self) -> None:
        """See :meth:`beluga.transfer.engine.CopyEngine.close`. A second call does nothing."""
        if self._buffers.closed:
            return
        self._driver.use()  # any thread may close
        try:
            for stream in {*self._own.values(), *self._paths.streams}:
                drain(self._driver, stream)
        except DriverError:  # copies may still run: keep windows and buffers
            keep_for_good(self)
            self._buffers.closed = True
            return
        shared.leave(self._registrar, self)
        for stream in self._own.values():
            self._driver.end_stream(stream)
        self._paths.close()
        for transfer in self._captured:
            self._launcher.give_back(transfer.launched)
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
        tables = make_tables(plan, write=directed.write)
        touched = self._windows.touched(tables.pieces["offset"])
        with self._registrar.hold(touched, self._driver) as hold:
            self._paths.begin()
            try:
                missing = touched - hold.addresses.keys()
                if missing:
                    return self._mixed(plan, tables, directed, hold, missing)
                parts = self._straight(plan, tables, directed, hold)
                return CudaTransfer(self._launcher, parts, lambda: None)
            except BaseException:  # only this call knows the parts in progress
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
        struct = plan.struct()
        plan.refuse_beyond(self._pool.geometry.size)
        with self._pool.using() as pool:
            code = lib.bl_plan_check(pool, struct)
        if code < 0:
            raise LayoutError("the plan's pieces are not of its chunks, or do not tile them")
        ends = plan.pieces["offset"] + plan.pieces["length"] - 1
        if ((plan.pieces["offset"] ^ ends) >= STRIPE_SIZE).any():
            raise LayoutError("a piece of the plan lies in two stripes; cut it where they end")

    def _mixed(
        self,
        plan: Plan,
        tables: Tables,
        directed: DirectedStream,
        hold: Hold,
        missing: set[WindowId],
    ) -> CudaTransfer:
        """Bounce the chunks in ``missing`` windows, and copy the others by the GPU."""
        ready = self._ready_chunks(plan, tables, missing)
        parts: list[Part] = []
        pairs = []
        if ready.any():
            some = select(plan, ready)
            pairs.append((ready, some))
            parts += self._straight(some, make_tables(some, write=directed.write), directed, hold)
        rest = select(plan, ~ready)
        pairs.append((~ready, rest))
        self._registrar.want(missing, rest.size)
        parts += self._paths.bounced(rest, directed)
        gather = functools.partial(_gather_sums, plan, pairs) if directed.write else lambda: None
        return CudaTransfer(self._launcher, parts, gather)

    def _straight(
        self, plan: Plan, tables: Tables, directed: DirectedStream, hold: Hold
    ) -> list[Part]:
        """Copy by the GPU alone."""
        if self._stages(plan, directed, hold):
            return self._paths.staged(plan, directed, hold)
        return self._paths.direct(plan, tables, directed, hold)

    def _stages(self, plan: Plan, directed: DirectedStream, hold: Hold) -> bool:
        """Return whether copy engines take part."""
        choice = self._path
        if choice == "auto":
            choice = self._calibration.choose(
                write=directed.write, size=plan.size, fragments=len(plan.pieces)
            )
        return choice == "staged" and self._paths.can_stage(plan, hold.addresses)

    def _ready_chunks(
        self, plan: Plan, tables: Tables, missing: set[WindowId]
    ) -> NDArray[np.bool_]:
        """Return for each chunk whether it lies in registered windows: shape (chunks,)."""
        device, window, _ = self._windows.places(tables.pieces["offset"])
        places = device << 32 | window
        lacking = np.isin(places, [d << 32 | w for d, w in missing])
        ready = np.ones(len(plan.chunks), bool)
        ready[tables.pieces["chunk"][lacking] - plan.chunk_base] = False
        return ready


def _gather_sums(plan: Plan, pairs: list[tuple[NDArray[np.bool_], Plan]]) -> None:
    """Copy the checksums that parts of a plan computed into the plan."""
    for mask, some in pairs:
        if plan.checksums is not None and some.checksums is not None:
            plan.checksums[mask] = some.checksums
