# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Options of the commands that read a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypedDict

import typer

from beluga.cli.options import among, one_of
from beluga.cli.output import say
from beluga.replay import BUNDLED
from beluga.simulate import FORMATS, TIME_UNITS, Trace, load_trace

RATE = 1.0  # requests per second
_RATE_MIN, _RATE_MAX = 1e-6, 1e9


def rate(text: str | float) -> float:
    """Parse requests per second as a parameter of the command line."""
    try:
        value = float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None
    if not _RATE_MIN <= value <= _RATE_MAX:
        raise typer.BadParameter(f"it is from {_RATE_MIN:g} to {_RATE_MAX:g}, not {value:g}")
    return value


Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        parser=one_of(*FORMATS),
        autocompletion=among(*FORMATS),
        metavar="NAME",
        help=f"The format of the trace: {', '.join(FORMATS)}. By default its content tells.",
    ),
]
TimeUnit = Annotated[
    str | None,
    typer.Option(
        parser=one_of(*TIME_UNITS),
        autocompletion=among(*TIME_UNITS),
        metavar="|".join(TIME_UNITS),
        help="The unit of the trace's times. By default the format fixes it, or its times tell.",
    ),
]
BlockTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="How many tokens a block of the trace has. By default input_length and hash_ids "
        "tell, and formats without blocks get 16.",
    ),
]
Rate = Annotated[
    float,
    typer.Option(parser=rate, metavar="N", help="Requests per second, for traces without times."),
]


class Read(TypedDict):
    """How a trace is read: the arguments of load_trace and of trace_requests."""

    path: Path
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
    """Return the arguments for reading the command line's trace, or else the bundled one."""
    if trace is None:
        given = (form, time_unit, block_tokens) != (None, None, None)
        if given or rate != RATE:
            raise typer.BadParameter("name a trace: the bundled one is read in one way only")
        say(f"no trace is named; {BUNDLED.name}, which is bundled, has made-up conversations")
        form, time_unit, block_tokens = "mooncake", "ms", 512
    return {
        "path": trace or BUNDLED,
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
    """Read the command line's trace, or else the bundled one, and show the assumptions."""
    loaded = load_trace(**named(trace, form, rate, time_unit, block_tokens))
    say(f"read {loaded.reading}")
    return loaded
