# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The ``beluga`` and ``cxl-rpc`` commands: how a command ends, whatever happens in it.

Exit status: 0 only on success; 1 and one line on stderr for anything a person can mend; 2 for a
command line that makes no sense; 130 after Ctrl-C, 143 after SIGTERM, 129 when its terminal goes
away. Results go to stdout, all else to stderr.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from beluga.errors import BelugaError

_TOOLS = ("typer", "rich", "msgspec")


def main() -> NoReturn:
    """The ``beluga`` command."""
    _run("beluga", "beluga.cli.app")


def cxl_rpc() -> NoReturn:
    """The ``cxl-rpc`` command."""
    _run("cxl-rpc", "beluga.cli.cxl_rpc")


def _open_streams() -> None:
    """Whoever closed a standard stream hears nothing; the next file that is opened is not it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  for good


def _run(name: str, module: str) -> NoReturn:
    _open_streams()
    try:
        app = import_module(module).app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _TOOLS:
            raise
        sys.exit(f"{name}: error: the commands need {missing}; pip install beluga-kv")
    except BelugaError as error:  # the environment asks for what this CPU has not
        sys.exit(f"{name}: error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))  # clean up first
    try:
        app(prog_name=name)
    except (BelugaError, OSError) as error:
        sys.exit(f"{name}: error: {error}")
    sys.exit(0)


if __name__ == "__main__":
    main()
