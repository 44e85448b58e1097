# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Options of the commands that read a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

from beluga.choices import TIME_UNITS, TRACE_FORMATS
from beluga.cli.frame import BadParameter, Option
from beluga.cli.output import print_note

if TYPE_CHECKING:  # slow to import
    from beluga.simulate import Trace

RATE = 1.0  # requests per second
_RATE_MIN, _RATE_MAX = 1e-6, 1e9


def rate(text: str | float) -> float:
    """Parse requests per second."""
    try:
        value = float(text)
    except ValueError:
        raise BadParameter(f"{text!r} is not a number; give one") from None
    if not _RATE_MIN <= value <= _RATE_MAX:
        raise BadParameter(f"{value:g} is out of range; give {_RATE_MIN:g} to {_RATE_MAX:g}")
    return value


class TraceOptions(TypedDict):
    """How a trace is read: arguments of load_trace and trace_requests."""

    form: str | None
    rate: float
    time_unit: str | None
    block_tokens: int | None


def trace_options(
    form: Annotated[str | None, Option("--format", words=TRACE_FORMATS)] = None,
    rate: Annotated[float, Option(parser=rate)] = RATE,
    time_unit: Annotated[str | None, Option(words=TIME_UNITS)] = None,
    block_tokens: Annotated[int | None, Option(min=1)] = None,
) -> TraceOptions:
    """Return how a trace is read.

    --format NAME: The format of the trace: {words}. Default: detected from its content.
    --rate N: Requests per second, for traces without times.
    --time-unit: The unit of the trace's times. Default: the format's, or detected from the times.
    --block-tokens: The tokens per block of the trace. Default: detected from input_length and
        hash_ids, and 16 for formats without blocks.
    """
    return {"form": form, "rate": rate, "time_unit": time_unit, "block_tokens": block_tokens}


def check_named(trace: Path | None, options: TraceOptions) -> None:
    """Refuse options without a trace, which is then the default one."""
    if trace is None:
        if options != trace_options():
            raise BadParameter("these options need a trace; name one")
        print_note("no trace is given; using 1,200 requests of synthetic conversations")


def read_named(trace: Path | None, options: TraceOptions) -> Trace:
    """Read the given trace, or the default one, and show the assumptions."""
    from beluga.simulate import load_trace

    check_named(trace, options)
    loaded = load_trace(trace, **options)
    print_note(f"read {loaded.reading}")
    return loaded
