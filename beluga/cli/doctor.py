# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The commands ``beluga doctor`` and ``verify``: whether this machine and its memory fit."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timezone
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import click

from beluga.cli.frame import BadParameter, Exit, Legend, Option, explains
from beluga.cli.options import Host, Json, PoolPaths, Wide, open_pool
from beluga.cli.output import print_facts, print_json, print_note, print_table
from beluga.errors import VerifyError

if TYPE_CHECKING:
    from beluga.doctor import Finding
    from beluga.verify import VerifyReport, VerifyResult


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


_LEGEND = Legend(
    {
        "test": "the tested property of the memory",
        "initiator": "the side that writes: a->b is side a; in store buffering both write",
        "mode": "with the verbs of software coherence, or with bare loads and stores",
        "trials": "the number of trials on all devices",
        "violations": "the number of trials that violated the property",
        "torn, rejected": "the number of half-written lines that were read and rejected",
        "verdict": "holds; does not hold (not required); or BROKEN (required)",
    }
)


@explains(_LEGEND)
def verify(
    pool: PoolPaths = None,
    peer: bool = False,
    role: Annotated[str | None, Option(words=("a", "b"))] = None,
    seconds: Annotated[float, Option(min=0)] = 3.0,
    timeout: Annotated[float, Option(min=0.1)] = 60.0,
    wide: Wide = False,
    json: Json = False,
) -> None:
    """Test an idle pool's memory against the coherence in its superblock. The exit status is 1 if a
    test fails.

    The verbs of software coherence (streamed stores, invalidation before reads) must work on all
    memory. Bare loads and stores are also tested; they must work only where the pool has hardware
    coherence.

    --peer: Run one side; run the other side on another host.
    --role: Which side this is. Side a determines the duration.
    --seconds: The duration of the tests in seconds.
    --timeout: The longest silence of the other side in seconds.
    """
    from beluga.verify import verify_pool

    if peer and role is None:
        raise BadParameter("--peer needs --role a on one host and --role b on the other")
    if role and not peer:
        raise BadParameter("--role goes with --peer")
    with open_pool(pool) as opened:
        if peer:
            print_note(f"side {role}: waiting for side {'b' if role == 'a' else 'a'}")
        report = verify_pool(opened, role=role, seconds=seconds, patience=timeout)
    if json:
        print_json(asdict(report) | {"good": report.good})
    else:
        _show(report, wide=wide)
    if not report.good:
        raise VerifyError(f"this is required but does not hold: {', '.join(report.broken())}")


def _show(report: VerifyReport, *, wide: bool) -> None:
    machine = report.machine
    started = datetime.fromtimestamp(report.started_s, timezone.utc)
    print_facts(
        {
            "pool": report.pool,
            "side": report.role,
            "machine": machine.name,
            "cpu": machine.cpu,
            "cpu features": " ".join(machine.cpu_features),
            "kernel": machine.kernel,
            "started": started.isoformat(timespec="seconds"),
            "seconds": report.seconds,
            **{
                f"device {device.index}": f"{device.path}, {device.kind}, {device.coherence}, "
                f"{device.holds}"
                for device in report.devices
            },
        }
    )
    print_table(
        _LEGEND,
        [
            _row(list(same))
            for _, same in groupby(report.findings, lambda f: (f.test, f.initiator, f.mode))
        ],
        spare=("torn, rejected", "trials"),
        wide=wide,
    )
    print_note("everything required holds" if report.good else "NOT everything required holds")


def _row(findings: list[VerifyResult]) -> list[object]:
    """Make the table's row for one test, initiator and mode over all devices."""
    first = findings[0]
    return [
        first.test,
        first.initiator,
        first.mode,
        sum(finding.trials for finding in findings),
        sum(finding.violations for finding in findings),
        sum(finding.rejected for finding in findings),
        _verdict(findings),
    ]


def _verdict(findings: list[VerifyResult]) -> str:
    violated = [f for f in findings if f.violations]
    if not violated:
        return "holds"
    devices = ", ".join(str(f.device) for f in violated)
    return f"{'BROKEN' if any(f.broken for f in violated) else 'does not hold'} on device {devices}"
