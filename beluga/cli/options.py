# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Options that several commands have, and the pool that they mean."""

from __future__ import annotations

from typing import Annotated

import typer

import beluga
from beluga.errors import DeviceSpecError
from beluga.pool import Pool, parse_size


def size(text: str | int) -> int:
    """Bytes of ``4096``, ``64MiB`` or ``2G``, as a parameter of the command line."""
    try:
        return parse_size(text)
    except DeviceSpecError as error:
        raise typer.BadParameter(str(error)) from None


Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
PoolPaths = Annotated[
    list[str] | None,
    typer.Option("--pool", metavar="PATH", help="A device of the pool; repeat for each."),
]
Host = Annotated[
    int | None,
    typer.Option(
        min=0, max=63, help="This machine's number among the pool's hosts; devdax needs it."
    ),
]
Timeout = Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds to wait.")]


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"beluga-kv {beluga.__version__}")
        raise typer.Exit


def show_version(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version."),
    ] = False,
) -> None:
    """The options of a program itself, without a command."""


def open_pool(paths: list[str] | None) -> Pool:
    """The pool on these devices, or the default one."""
    return Pool.open(paths) if paths else Pool.mount()
