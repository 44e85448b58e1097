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


Format = Annotated[
    str | None,
    Option(
        "--format",
        words=TRACE_FORMATS,
        metavar="NAME",
        help=(
            f"The format of the trace: {', '.join(TRACE_FORMATS)}. Default: detected from its "
            "content."
        ),
    ),
]
TimeUnit = Annotated[
    str | None,
    Option(
        words=TIME_UNITS,
        help="The unit of the trace's times. Default: the format's, or detected from the times.",
    ),
]
BlockTokens = Annotated[
    int | None,
    Option(
        min=1,
        metavar="N",
        help=(
            "The tokens per block of the trace. Default: detected from input_length and hash_ids, "
            "and 16 for formats without blocks."
        ),
    ),
]
Rate = Annotated[
    float,
    Option(parser=rate, metavar="N", help="Requests per second, for traces without times."),
]


class Read(TypedDict):
    """How a trace is read: the arguments of load_trace and trace_requests."""

    path: Path | None
    form: str | None
    rate: float
    time_unit: str | None
    block_tokens: int | None


def named(
    trace: Path | None,
    form: str | None,
    rate: float,
    time_unit: str | None,
    block_tokens: int | None,
) -> Read:
    """Return the arguments for reading the given trace, or the default one."""
    if trace is None:
        read_as = (form, time_unit, block_tokens) != (None, None, None)
        if read_as or rate != RATE:
            raise BadParameter("these options need a trace; name one")
        print_note("no trace is given; using 1,200 requests of synthetic conversations")
    return {
        "path": trace,
        "form": form,
        "rate": rate,
        "time_unit": time_unit,
        "block_tokens": block_tokens,
    }


def read_named(
    trace: Path | None,
    form: str | None = None,
    rate: float = RATE,
    time_unit: str | None = None,
    block_tokens: int | None = None,
) -> Trace:
    """Read the given trace, or the default one, and show the assumptions."""
    from beluga.simulate import load_trace

    loaded = load_trace(**named(trace, form, rate, time_unit, block_tokens))
    print_note(f"read {loaded.reading}")
    return loaded
