# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Options of the commands that read a trace."""

from __future__ import annotations

from typing import Annotated

import typer

from beluga.simulate import FORMATS

Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        help=f"The format of the trace: {', '.join(FORMATS)}. By default its content tells.",
    ),
]
Rate = Annotated[float, typer.Option(help="Requests per second, for traces without times.")]
