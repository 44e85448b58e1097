# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command line of scripts that write files: ``--check`` compares them instead, and ``--help``
prints the script's purpose.
"""

from __future__ import annotations

import argparse


def is_check(text: str | None) -> bool:
    """Return whether ``--check`` is given. Any other argument ends the script, as ``--help`` does
    after it has printed ``text``.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, and compare")
    return bool(parser.parse_args().check)
