# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command ``beluga doctor``: checks this machine and shows how to fix problems."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from beluga.cli.frame import Exit
from beluga.cli.options import Host, Json, PoolPaths
from beluga.cli.output import print_json, print_note

if TYPE_CHECKING:
    from beluga.doctor import Finding


def doctor(pool: PoolPaths = None, host: Host = None, json: Json = False) -> None:
    """Check this machine: one line for each finding, with a fix.

    Checks the CPU, memory, limits, devices, packages and leftovers of this machine, and the pool
    that is named or mounted, if there is one. It changes nothing, and pings the server. The exit
    status is 1 if there is an error, and 0 if there are at most warnings. A check that is not
    possible is a warning.
    """
    from beluga.doctor import Machine, PoolLook, diagnose

    findings = diagnose(Machine(pool=PoolLook.named(pool, host)))
    if json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            click.echo(_line(finding))
        count = {level: sum(each.level == level for each in findings) for level in _LEVELS}
        print_note(", ".join(f"{number} {level}" for level, number in count.items()))
    if any(finding.level == "error" for finding in findings):
        raise Exit(1)


_LEVELS = ("ok", "warning", "error")


def _line(finding: Finding) -> str:
    line = f"{finding.name}: {finding.level}: {finding.text}"
    return f"{line}; fix: {finding.fix}" if finding.fix else line
