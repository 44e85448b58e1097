# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Helpers that all commands of this harness share: how they print, fail and clean up."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from beluga.errors import BelugaError


def progress(line: str) -> None:
    """Print progress on standard error."""
    print(line, file=sys.stderr, flush=True)


def run_in_folder(name: str, body: Callable[[Path], bool]) -> NoReturn:
    """Run ``body`` with a temporary folder for logs. The process exits with 0 if it returns true.

    ``body``'s contexts are always exited before the process ends, even after Ctrl-C.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    folder = Path(tempfile.mkdtemp(prefix=f"beluga-{name}-"))
    os.environ["TMPDIR"] = str(folder)  # engines that are killed leave files
    try:
        passed = body(folder)
    except BelugaError as error:
        sys.exit(f"{name}: error: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"{name}: error: no model: {error.stderr[-2000:]}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(0 if passed else 1)


def positive(text: str) -> int:
    """Parse an option's whole number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError("1 or more")
    return int(text)
