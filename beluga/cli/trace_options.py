# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Options of the commands that read a trace."""

from __future__ import annotations

from typing import Annotated

import typer

from beluga.cli.options import one_of
from beluga.simulate import FORMATS

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
Rate = Annotated[
    float,
    typer.Option(parser=rate, metavar="N", help="Requests per second, for traces without times."),
]
