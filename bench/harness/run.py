# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A run of several benchmarks, which keeps every row that was finished when one fails or the run
is interrupted, and reports how much is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from beluga.errors import BelugaError

from .options import Options
from .row import Bench, Row

# The approximate number of measurements of each benchmark, on two cores without a GPU or a DSA. One
# that reports more raises its own count.
STEPS = {
    "coherence": 6,
    "latency": 12,
    "bandwidth": 20,
    "rpc": 12,
    "rpc-peers": 18,
    "recovery": 1,
    "copy": 53,
    "scheduler": 17,
    "gateway": 10,
    "index": 5,
    "indexer": 4,
    "blocks": 2,
    "events": 4,
    "tiers-disk": 15,
    "tiers-pool": 4,
    "tiers-remote": 8,
}


@dataclass(slots=True)
class Outcome:
    """The result of a run: the finished rows, the reason for each incomplete benchmark, and the
    interruption that ended the run, if any.
    """

    rows: list[Row] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    ended: BaseException | None = None


class _Steps:
    """Adds to each line of progress its number, the total number, and the remaining time."""

    def __init__(self, names: Sequence[str], write: Callable[[str], None]) -> None:
        self._write = write
        self._counts = {name: STEPS.get(name, 1) for name in names}
        self._done, self._before, self._began_s = 0, 0, time.monotonic()
        self._name = ""

    def begin(self, name: str) -> None:
        """Begin a benchmark."""
        self._name = name

    def end(self) -> None:
        """End a benchmark: it had as many steps as were reported."""
        self._counts[self._name] = self._done - self._before
        self._before = self._done

    def report(self, text: str) -> None:
        """Report the measurement that begins."""
        spent_s = time.monotonic() - self._began_s
        own = self._done - self._before + 1
        self._counts[self._name] = max(self._counts[self._name], own)
        total = sum(self._counts.values())
        left = ""
        if self._done:
            left = f", about {_span(spent_s / self._done * (total - self._done))} left"
        self._done += 1
        self._write(f"{text} ({self._done} of about {total}{left})")


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def run(
    benches: Mapping[str, Bench],
    names: Sequence[str],
    options: Options,
    *,
    finished: Callable[[Sequence[Row]], None] | None = None,
) -> Outcome:
    """Run benchmarks one after another. One that fails does not end the run; Ctrl-C and SIGTERM do.
    Either way the rows that a benchmark had finished are kept. ``finished`` is called with the rows
    of each benchmark when it ends. Raises the error of a single benchmark that has no row.
    """
    outcome = Outcome()
    steps = None if options.progress is None else _Steps(names, options.progress)
    for at, name in enumerate(names):
        rows: list[Row] = []
        chosen = replace(options, keep=rows.append)
        if steps is not None:
            chosen = replace(chosen, progress=steps.report)
            steps.begin(name)
        try:
            rows = benches[name](chosen)
        except (BelugaError, OSError) as error:
            outcome.missing[name] = f"it failed{_after(rows)}: {error}"
            if len(names) == 1 and not rows:
                raise
            options.report(f"{name} failed{_after(rows)}: {error}")
        except (KeyboardInterrupt, SystemExit) as error:
            outcome.ended = error
            outcome.missing |= dict.fromkeys(names[at:], "the run was interrupted")
        if steps is not None:
            steps.end()
        outcome.rows += rows
        if finished is not None and rows:
            finished(rows)
        if outcome.ended is not None:
            break
    return outcome


def _after(rows: Sequence[Row]) -> str:
    return f" after {len(rows)} rows" if rows else ""
