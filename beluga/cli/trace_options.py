# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Options of the commands that read a trace."""

from __future__ import annotations

from typing import Annotated

import typer

from beluga.cli.options import one_of
from beluga.simulate import FORMATS, TIME_UNITS

_RATE_MIN, _RATE_MAX = 1e-6, 1e9  # requests per second


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
        metavar="NAME",
        help=f"The format of the trace: {', '.join(FORMATS)}. By default its content tells.",
    ),
]
TimeUnit = Annotated[
    str | None,
    typer.Option(
        parser=one_of(*TIME_UNITS),
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
