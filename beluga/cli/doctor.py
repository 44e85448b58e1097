# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command ``beluga doctor``: is this machine fit, and what mends what is not?"""

from __future__ import annotations

from dataclasses import asdict

import typer

from beluga.cli.options import Host, Json, PoolPaths
from beluga.cli.output import print_json, say
from beluga.doctor import Finding, Machine, PoolLook, diagnose


def doctor(pool: PoolPaths = None, host: Host = None, json: Json = False) -> None:
    """Check whether this machine is fit: one line for each finding, with what mends it.

    Looks at the CPU, memory, limits, devices, packages and leftovers of this machine, and at the
    pool that is named or mounted, if there is one. Nothing is changed; a server is asked as by
    ping. The exit status is 1 if there is an error, and 0 if there are at most warnings. What
    cannot be told is a warning.
    """
    findings = diagnose(Machine(pool=PoolLook.named(pool, host)))
    if json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            typer.echo(_line(finding))
        count = {level: sum(each.level == level for each in findings) for level in _LEVELS}
        say(", ".join(f"{number} {level}" for level, number in count.items()))
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


_LEVELS = ("ok", "warning", "error")


def _line(finding: Finding) -> str:
    line = f"{finding.name}: {finding.level}: {finding.text}"
    return f"{line}; mend: {finding.mend}" if finding.mend else line
