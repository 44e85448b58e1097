# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Starts a module as a program of its own, which imports nothing from the current folder.

``python -m MODULE`` looks for modules in the current folder first: a folder there that is called
``beluga`` would be imported and run. ``-P`` prevents that, but Python 3.10 does not have it. So
this file is the program: ``python .../beluga/child.py MODULE ARGUMENT...``. Scripts start modules
the same way.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from subprocess import Popen
    from typing import NoReturn


def command(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """The command line that runs ``module``; ``python`` is an interpreter that has it."""
    return [python, __file__, module, *arguments]


def start(module: str, *arguments: str, **options: Any) -> Popen[Any]:
    """Start ``module`` as a child process that Ctrl-C does not reach: its parent handles the
    interrupt and ends its children. ``options`` are those of :class:`subprocess.Popen`.
    """
    import signal  # not above: this file is also a program, see _main
    import subprocess

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(command(module, *arguments), **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_program(main: Callable[[], int | None]) -> NoReturn:
    """Run the main function of a program that a user starts. Ctrl-C, SIGTERM and SIGHUP end it with
    the status 130, 143 or 129, without a traceback; it cleans up first.
    """
    import os
    import signal

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of the output has ended
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123  so that the exit flushes nothing
        sys.exit(1)


def _main() -> None:
    own_folder = __file__.rpartition("/")[0]
    if sys.path[0] == own_folder:  # Python puts it there, unless PYTHONSAFEPATH is set
        del sys.path[0]
    import runpy  # imported late: this folder's modules would hide the standard library's

    module = sys.argv[1]
    del sys.argv[0]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:  # while it imports; see run_program
        sys.exit(130)


if __name__ == "__main__":
    _main()
