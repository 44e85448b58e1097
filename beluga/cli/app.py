# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The commands of ``beluga`` and ``cxl-rpc`` by name, and the options before them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

import beluga
from beluga import config
from beluga.cli import logs
from beluga.cli.frame import CommandGroup, Program, parameters_of
from beluga.cli.options import LogFormat, LogLevel
from beluga.errors import SettingsError


def _show_version(context: click.Context, _: click.Parameter, requested: bool) -> None:
    if requested and not context.resilient_parsing:
        click.echo(f"beluga-kv {beluga.__version__}")
        context.exit()


def _show_completion(context: click.Context, _: click.Parameter, requested: bool) -> None:
    """Print the script with which a shell completes the commands of this program."""
    if not requested or context.resilient_parsing:
        return
    from click.shell_completion import get_completion_class

    name, root = config.shell(), context.command
    shell = get_completion_class(name)
    if shell is None:
        raise click.UsageError(f"SHELL is {name or 'not set'}; set it to bash, zsh or fish")
    variable = f"_{root.name}_COMPLETE".replace("-", "_").upper()
    click.echo(shell(root, {}, root.name or "", variable).source())
    context.exit()


_FLAG: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
_COMPLETION_HELP = "Print the script that completes commands and options in your SHELL."


def _options(
    config: Path | None = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Declare the options before a command.

    --config: Read the defaults of options from this beluga.toml; /dev/null for none.
    """


@click.pass_context
def _prepare(
    context: click.Context, config: Path | None, log_level: str | None, log_format: str | None
) -> None:
    """Read the settings file, and choose the log, before a command runs."""
    named = config
    if any(word in ("-h", "--help") for word in sys.argv):
        return  # the help does not depend on settings, which may be invalid
    _read_settings(context, named, {"--log-level": log_level, "--log-format": log_format})


def _read_settings(
    context: click.Context, named: Path | None, flags: Mapping[str, str | None]
) -> None:
    from beluga.cli import settings

    path = settings.find(named)
    variables: dict[str, Any] = {
        "BELUGA_POOL": config.environment_pool_paths(),
        "BELUGA_LOG_LEVEL": config.log_level(),
        "BELUGA_LOG_FORMAT": config.log_format(),
    }
    for name, words in (("BELUGA_LOG_LEVEL", logs.LEVELS), ("BELUGA_LOG_FORMAT", logs.FORMATS)):
        if variables[name] and variables[name] not in words:
            raise SettingsError(f"{name} is {variables[name]!r}; give one of {', '.join(words)}")
    arguments = {**variables, **flags}
    above = {_key(name): name for name, value in arguments.items() if value}
    context.obj = settings.load(path, context, above)
    context.default_map = dict(context.obj.defaults)
    config.prefer_pool(context.obj.shared.get("pool", []))
    chosen = {**context.obj.shared, **{_key(n): v for n, v in arguments.items() if v}}
    logs.choose(chosen.get("log_level"), chosen.get("log_format"))


def _key(name: str) -> str:
    """Return ``log_level`` for ``--log-level`` and ``BELUGA_LOG_LEVEL``."""
    return name.removeprefix("BELUGA_").strip("-").replace("-", "_").lower()


def _program(name: str, text: str, targets: Mapping[str, str | CommandGroup]) -> Program:
    version = click.Option(["--version"], callback=_show_version, help="Show the version.", **_FLAG)
    completion = click.Option(
        ["--show-completion"], callback=_show_completion, help=_COMPLETION_HELP, **_FLAG
    )
    params = [version, *parameters_of(_options), completion]
    return Program(text, targets, name=name, params=params, callback=_prepare)


app = _program(
    "beluga",
    "A shared KV-cache pool for LLM inference on CXL memory, or on the memory you have.",
    {
        "mount": "pool:mount",
        "umount": "pool:umount",
        "serve": "serve:serve",
        "stop": "detach:stop",
        "ping": "ping:ping",
        "stat": "stat:stat",
        "trace": "trace:trace",
        "quota": "operate:quota",
        "drain": "operate:drain",
        "top": "top:top",
        "dashboard": "top:dashboard",
        "put": "block:put",
        "get": "block:get",
        "explain": "block:explain_keys",
        "ls": "block:ls",
        "rm": "block:rm",
        "prefill-worker": "prefill_worker:prefill_worker",
        "replay": "replay:replay",
        "gateway": "gateway:gateway",
        "simulate": "simulate:simulate",
        "size": "size:size_tiers",
        "verify": "doctor:verify",
        "doctor": "doctor:doctor",
        "config": "settings:show_settings",
        "bench": "bench:bench",
        "disk": CommandGroup("Give disks below a pool to another server.", {"adopt": "pool:adopt"}),
        "pool": CommandGroup(
            "Create, show, check and destroy pools.",
            {
                "create": "pool:create",
                "info": "pool:info",
                "check": "pool:check",
                "destroy": "pool:destroy",
            },
        ),
    },
)

cxl_rpc = _program(
    "cxl-rpc",
    "Make calls over shared memory: a server, a client, and a benchmark.",
    {
        "ping": "ping:ping",
        "bench": "bench:rpc",
        "serve": "lanes:serve_lanes",
        "call": "lanes:call",
        "list": "lanes:list_handlers",
    },
)
