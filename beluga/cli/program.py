# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The options of the programs before a command: the settings file and the log."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import beluga
from beluga import config
from beluga.cli import logs, settings
from beluga.cli.options import LogFormat, LogLevel, log_format_name, log_level_name
from beluga.errors import SettingsError


def _show_version(given: bool) -> None:
    if given:
        typer.echo(f"beluga-kv {beluga.__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version."),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="PATH",
        help="Read the defaults of options from this beluga.toml; /dev/null for none.",
    ),
]


def of(program: str) -> Callable[..., None]:
    """Return the callback that runs before each command of a program."""

    def prepare(
        ctx: typer.Context,
        version: Version = False,
        config_path: Config = None,
        log_level: LogLevel = None,
        log_format: LogFormat = None,
    ) -> None:
        above = _above(log_level, log_format)
        try:
            ctx.obj = settings.load(settings.find(config_path), ctx, program, above)
        except SettingsError:
            if not _is_help_requested():
                raise
            return
        ctx.default_map = dict(ctx.obj.defaults)
        shared = ctx.obj.shared
        config.prefer_pool(shared.get("pool", []))
        given = _from_environment()
        logs.choose(
            log_level or given["log_level"] or shared.get("log_level"),
            log_format or given["log_format"] or shared.get("log_format"),
        )

    return prepare


def _from_environment() -> dict[str, str | None]:
    """Return the log settings of the environment. Raises SettingsError."""
    try:
        level, form = config.log_level(), config.log_format()
        return {
            "log_level": level and log_level_name(level),
            "log_format": form and log_format_name(form),
        }
    except typer.BadParameter as error:
        raise SettingsError(f"BELUGA_LOG_LEVEL or BELUGA_LOG_FORMAT: {error.message}") from None


def _above(log_level: str | None, log_format: str | None) -> dict[str, str]:
    """Return the flag or variable that overrides a key of the file, by key."""
    keys: dict[str, Any] = {
        "BELUGA_POOL": ("pool", config.environment_pool_paths()),
        "BELUGA_LOG_LEVEL": ("log_level", config.log_level()),
        "BELUGA_LOG_FORMAT": ("log_format", config.log_format()),
        "--log-level": ("log_level", log_level),
        "--log-format": ("log_format", log_format),
    }
    return {key: name for name, (key, value) in keys.items() if value}


def _is_help_requested() -> bool:
    """Return whether the help of a command is requested. It is shown even if settings are
    invalid.
    """
    return any(word in ("-h", "--help") for word in sys.argv)
