# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The options of a run of the benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SOFTWARE, HARDWARE = "software", "hardware"


@dataclass(frozen=True, slots=True)
class Options:
    """The options. ``None`` leaves a choice to the benchmark.

    ``smoke`` runs in seconds and shows that the benchmark works, not how fast the machine is.
    ``pool`` names the devices of an empty pool that may be overwritten; without it each benchmark
    makes an emulated pool and removes it. ``coherence`` is "hardware" or "software"; the default is
    software, because the paper's memory has it. ``pace`` slows devices down, as in
    "device=22.5GB/s,latency=650ns" (see ``pace.py``). ``threads`` is the most that bandwidth and
    copy use. ``disk`` is a folder on the disk for the disk tier of tiers-disk and tiers-pool; the
    default is the current folder. ``progress`` gets a line about each measurement before it begins,
    and ``keep`` gets each row when it is finished.
    """

    smoke: bool = False
    pool: tuple[str, ...] | None = None
    coherence: str | None = None
    pace: str | None = None
    threads: int | None = None
    disk: str | None = None
    seed: int = 0
    progress: Callable[[str], None] | None = None
    keep: Callable[[dict[str, Any]], None] | None = None

    @property
    def pair_count(self) -> int:
        """The number of pairs (limit, ours) behind a ratio."""
        return 3 if self.smoke else 9

    @property
    def retry_count(self) -> int:
        """How often a ratio with an unsteady limit is measured again."""
        return 0 if self.smoke else 3

    def report(self, text: str) -> None:
        """Report progress."""
        if self.progress is not None:
            self.progress(text)

    def command(self, bench: str) -> str:
        """Return the command line with these options."""
        words = ["beluga", "bench", bench, *(["--smoke"] if self.smoke else [])]
        for path in self.pool or ():
            words += ["--pool", path]
        for name in ("coherence", "pace", "threads", "disk"):
            if (value := getattr(self, name)) is not None:
                words += [f"--{name}", str(value)]
        return " ".join([*words, *(["--seed", str(self.seed)] if self.seed else [])])
