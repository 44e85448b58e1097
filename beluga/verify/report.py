# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The report of an acceptance test."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from beluga._ffi import lib
from beluga.coherence import features

if TYPE_CHECKING:
    from beluga.pool import DeviceView

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
