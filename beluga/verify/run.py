# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Run the litmus programs of ``csrc/verify`` on a pool, and report their outcomes."""

from __future__ import annotations

import errno
import fcntl
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from beluga._ffi import core, ffi, lib
from beluga.coherence import features
from beluga.errors import VerifyError, raise_for_status
from beluga.threads import Thread, wait_for

if TYPE_CHECKING:
    from beluga.pool import DeviceView, Pool

TESTS = {
    lib.BL_ACCEPTANCE_MESSAGE_PASSING: "message passing",
    lib.BL_ACCEPTANCE_STORE_BUFFERING: "store buffering",
    lib.BL_ACCEPTANCE_TEARING_8: "tearing, 8 B",
    lib.BL_ACCEPTANCE_TEARING_16: "tearing, 16 B",
    lib.BL_ACCEPTANCE_TEARING_32: "tearing, 32 B",
    lib.BL_ACCEPTANCE_TEARING_64: "tearing, 64 B",
    lib.BL_ACCEPTANCE_LATE_EVICTION: "late eviction",
    lib.BL_ACCEPTANCE_PREFETCH: "prefetch staleness",
}
MODES = {lib.BL_ACCEPTANCE_SOFTWARE: "software", lib.BL_ACCEPTANCE_BARE: "bare"}
INITIATORS = ("a->b", "b->a")

# Memory guarantees that 8 bytes are not torn; there is no guarantee for more.
_UNPROMISED = ("tearing, 16 B", "tearing, 32 B", "tearing, 64 B")


@dataclass(frozen=True, slots=True)
class MachineRecord:
    """The machine on which this side ran."""

    name: str
    cpu: str
    cpu_features: tuple[str, ...]  # the features that Beluga's verbs use
    kernel: str

    @classmethod
    def here(cls) -> MachineRecord:
        """Describe this machine."""
        system = platform.uname()
        return cls(system.node, _cpu_name(), tuple(sorted(features())), system.release)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The result of one test, for one initiator in one mode on one device.

    The initiator of "a->b" is side a, which writes (in store buffering both write). ``rejected``
    counts torn lines that their check value exposed, which is legal. ``promised``: the device's
    superblock guarantees the property. The verbs always guarantee it, bare loads and stores only on
    a device with hardware coherence.
    """

    test: str
    initiator: str
    mode: str
    device: int  # the device's index in the pool
    trials: int
    violations: int
    rejected: int
    promised: bool

    @classmethod
    def of(
        cls, test: int, mode: int, initiator: int, device: DeviceView, **counts: int
    ) -> VerifyResult:
        """Convert the numbers of ``csrc/api/verify.h``."""
        bare = mode == lib.BL_ACCEPTANCE_BARE
        owed = device.coherence == "hardware" and TESTS[test] not in _UNPROMISED
        return cls(
            test=TESTS[test],
            initiator=INITIATORS[initiator],
            mode=MODES[mode],
            device=device.index,
            promised=owed if bare else True,
            **counts,
        )

    @property
    def broken(self) -> bool:
        """Whether the property is guaranteed but does not hold."""
        return self.promised and self.violations > 0


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a test on a pool. ``role`` is "a" or "b", or "alone" if both sides ran here."""

    pool: str
    machine: MachineRecord
    role: str
    started_s: float  # seconds since 1970, by this machine's clock
    seconds: float
    devices: tuple[DeviceView, ...]
    findings: tuple[VerifyResult, ...]

    @property
    def good(self) -> bool:
        """Whether every guaranteed property held."""
        return not any(finding.broken for finding in self.findings)

    def broken(self) -> list[str]:
        """Return the guaranteed properties that do not hold, each once, as text."""
        lines = [f"{f.test} {f.initiator} ({f.mode})" for f in self.findings if f.broken]
        return list(dict.fromkeys(lines))


ROLES = ("a", "b")
_LOOK_INTERVAL_S = 0.1

_WHY = {
    errno.EBUSY: "a server of the pool is running, or was killed: stop it, or make a pool for "
    "the test",
    errno.ENOSPC: "a device has no free stripe near its end: make a pool for the test",
    errno.ETIMEDOUT: "side {other} did not come within {patience:g} s; run 'beluga verify --peer "
    "--role {other}' on the other host, on the same pool",
    errno.EPIPE: "side {other} did not respond for {patience:g} s; run both sides again",
}


def verify_pool(
    pool: Pool, *, role: str | None = None, seconds: float = 3.0, patience: float = 60.0
) -> VerifyReport:
    """Test the memory of an idle pool and report which properties hold.

    ``role`` "a" or "b" is one side of two; the other side runs on another host or in another
    process of this host. None runs both sides here. The tests repeat for ``seconds`` (side a
    decides), at least once. ``patience`` is how many seconds to wait for the other side.

    Only empty stripes are written to, and they are zero afterwards. Raises VerifyError if the pool
    has a server or no free stripe, or if the other side does not come.
    """
    started_s, start = time.time(), time.monotonic()
    with ExitStack() as stack:
        sides = []
        for name in ROLES if role is None else (role,):
            stack.enter_context(_alone_as(pool, name))
            sides.append(stack.enter_context(_side(pool, name, seconds, patience)))
        for name, code in _run(sides):
            _raise(code, name, patience)
        findings = _findings(pool, sides[0][1])
    return VerifyReport(
        pool=pool.id,
        machine=MachineRecord.here(),
        role=role or "alone",
        started_s=started_s,
        seconds=time.monotonic() - start,
        devices=pool.devices,
        findings=findings,
    )


@contextmanager
def _alone_as(pool: Pool, role: str) -> Iterator[None]:
    """Raise VerifyError if another process of this host runs this side, and exclude others
    meanwhile.
    """
    with (pool.runtime_dir / f"verify-{role}").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise VerifyError(f"side {role} of a test runs on this host already") from None
        yield


@contextmanager
def _side(
    pool: Pool, role: str, seconds: float, patience: float
) -> Iterator[tuple[str, core.bl_acceptance]]:
    config = ffi.new(
        "bl_acceptance_config *",
        {
            "duration_ns": int(seconds * 1e9),
            "patience_ns": int(patience * 1e9),
            "role": ROLES.index(role),
            "tests": (1 << lib.BL_ACCEPTANCE_TEST_COUNT) - 1,
            "modes": (1 << lib.BL_ACCEPTANCE_MODE_COUNT) - 1,
        },
    )
    out = ffi.new("bl_acceptance **")
    with pool.using() as handle:
        _raise(lib.bl_acceptance_create(handle, config, out), role, patience)
        try:
            yield role, out[0]
        finally:
            lib.bl_acceptance_destroy(out[0])


def _run(sides: list[tuple[str, core.bl_acceptance]]) -> list[tuple[str, int]]:
    """Run each side on its own thread; Ctrl-C stops them. Returns the result code of each side."""
    codes: dict[str, int] = {}
    go = threading.Event()

    def run(role: str, side: core.bl_acceptance) -> None:
        go.wait()
        if len(started) == len(sides):
            codes[role] = lib.bl_acceptance_run(side)
            if codes[role] < 0:  # the other side would wait for this one
                for _, other in sides:
                    lib.bl_acceptance_stop(other)

    threads = [Thread(target=run, args=side, daemon=True) for side in sides]
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            # If Ctrl-C comes during start(), the thread is not listed, and then no side runs.
            started.append(thread)
        go.set()
        for thread in threads:
            while thread.is_alive():
                thread.join(_LOOK_INTERVAL_S)
    finally:
        go.set()
        for _, side in sides:
            lib.bl_acceptance_stop(side)
        wait_for(started)  # C uses the side's memory until its thread ends
    return list(codes.items())


def _findings(pool: Pool, side: core.bl_acceptance) -> tuple[VerifyResult, ...]:
    cells = ffi.new("bl_acceptance_cell **")
    count = lib.bl_acceptance_cells(side, cells)
    return tuple(
        VerifyResult.of(
            cell.test,
            cell.mode,
            cell.initiator,
            pool.devices[cell.device],
            trials=cell.trials,
            violations=cell.violations,
            rejected=cell.rejected,
        )
        for cell in (cells[0][i] for i in range(count))
    )


def _raise(code: int, role: str, patience: float) -> None:
    if -code in _WHY:
        other = ROLES[1 - ROLES.index(role)]
        raise VerifyError(_WHY[-code].format(other=other, patience=patience))
    raise_for_status(code, "verifying a pool")
