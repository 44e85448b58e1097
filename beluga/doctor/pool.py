# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Checks of one pool: its devices, their superblocks, its server, and this host's number."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from typing import NamedTuple

from beluga.doctor.devices import quoted_command
from beluga.doctor.finding import Verdict, error, ok, unknown, warning, worst
from beluga.doctor.leftovers import share_runtime_dir
from beluga.doctor.machine import Machine
from beluga.doctor.pool_look import PoolInspection
from beluga.errors import (
    BelugaError,
    BootIdError,
    CallTimeoutError,
    DeviceMissingError,
    DevicePermissionError,
    DeviceSpecError,
    HostClashError,
    NoLaneError,
    NoServerError,
    RuntimeDirError,
    SecondHostError,
)
from beluga.pool import DeviceSpec, examine, show_size, survey

_NO_POOL = "no pool is named (--pool PATH) or mounted"
_FIRST = "first fix what pool-devices and pool-superblocks report"
_LOST = ("version", "format", "damaged", "geometry", "disagrees")  # only a new pool helps


def check_devices(machine: Machine) -> Verdict:
    """Examine each device of the pool, without mapping it."""
    look = machine.pool
    if look.failure is not None:
        return error(str(look.failure), look.fix)
    if not look.paths:
        return ok(_NO_POOL)
    verdicts, shown = [], []
    for path in look.paths:
        try:
            device = examine(DeviceSpec.parse(path), sysfs=machine.root / "sys")
            shown.append(f"{path} ({device.kind}, {show_size(device.size)})")
            if not os.access(device.spec.path, os.R_OK | os.W_OK):
                raise DevicePermissionError(
                    f"{device.spec.path}: this user may not read and write it"
                )
        except BelugaError as failure:
            verdicts.append(error(str(failure), _mend_device(machine, path, failure)))
    return worst(verdicts, ", ".join(shown))


def _mend_device(machine: Machine, path: str, failure: BelugaError) -> str:
    if (command := quoted_command(failure)) is not None:
        return command
    if isinstance(failure, DevicePermissionError):
        return f"sudo setfacl -m u:{machine.uid}:rw {shlex.quote(path)}"
    if isinstance(failure, DeviceSpecError):
        return "write PATH or PATH@OFFSET+SIZE, in steps of 2 MiB"
    file = DeviceSpec.parse(path).path
    if "/dev/dax" in path:
        return "daxctl list -u"
    if isinstance(failure, DeviceMissingError) and not os.path.lexists(file):
        make = "" if file.parent.is_dir() else f"mkdir -p {shlex.quote(str(file.parent))} && "
        return f"{make}beluga pool create {machine.pool.operands}"
    return "name a devdax device or a file: --pool PATH"


def _without(machine: Machine) -> Verdict | None:
    """Return the verdict of a check of the pool's content if there is no readable pool."""
    look = machine.pool
    if look.failure is not None:
        return unknown("the pool's devices are not known", look.fix)
    return None if look.paths else ok(_NO_POOL)


def check_superblocks(machine: Machine) -> Verdict:
    """Check the superblocks: the format's version, and whether all belong together."""
    if (without := _without(machine)) is not None:
        return without
    paths = machine.pool.paths
    try:
        findings = survey(paths)
    except (BelugaError, OSError) as failure:
        if check_devices(machine).level == "error":
            return unknown(str(failure), _FIRST)
        return error(f"a device cannot be read: {failure}", "sudo dmesg")
    return worst(
        [error(finding, _mend_superblock(finding, machine)) for finding in findings],
        f"{len(paths)} superblocks of this Beluga's format, of one pool",
    )


def _mend_superblock(finding: str, machine: Machine) -> str:
    kind = finding.partition(" ")[0].removeprefix("superblock-")
    if kind in _LOST:
        return f"beluga pool create --force {machine.pool.operands}"
    if kind in ("empty", "foreign"):
        return f"beluga pool create {machine.pool.operands}"
    if kind == "device-missing":
        return "name every device of the pool: --pool PATH, repeated"
    return f"beluga pool check {machine.pool.options}"


def _facts(machine: Machine) -> PoolInspection | Verdict:
    if (without := _without(machine)) is not None:
        return without
    facts = machine.pool.facts
    if isinstance(facts, PoolInspection):
        return facts
    return unknown(str(facts), _FIRST)


def check_coherence(machine: Machine) -> Verdict:
    """Check the coherence mode of each device against its kind."""
    facts = _facts(machine)
    if isinstance(facts, Verdict):
        return facts
    again = f"beluga pool create --force --coherence software {machine.pool.operands}"
    assumed = [
        device
        for device in facts.devices
        if device.kind == "devdax" and device.coherence == "hardware"
    ]
    verdicts = [
        warning(
            f"{device.path} is a metadata device with hardware coherence, which Beluga cannot "
            "detect: if the caches of two hosts are not coherent for it, calls get stale replies; "
            "test it on two hosts (--role a, --role b)",
            f"beluga verify --peer --role a {machine.pool.options}",
        )
        if device.holds == "metadata"
        else warning(
            f"{device.path} is a devdax device with hardware coherence: if two hosts share it, "
            "reads are stale; a new pool on it must have software coherence",
            f"{again}",
        )
        for device in assumed
    ]
    whose = "one host" if facts.one_host else "several hosts"
    kinds = sorted({device.coherence for device in facts.devices if device.holds != "metadata"})
    first = facts.devices[0]
    apart = f", and {first.coherence} for metadata" if first.holds == "metadata" else ""
    return worst(verdicts, f"{' and '.join(kinds)} coherence{apart}: the pool is for {whose}")


class _Rule(NamedTuple):
    """The meaning of a failed attempt to attach, and its remedy."""

    failure: type[BelugaError]
    verdict: Callable[[str, str], Verdict]
    text: str
    fix: str


_SHOW_BOOT_ID = "show /proc/sys/kernel/random/boot_id in this container or sandbox"
_OF_SERVER = (
    _Rule(NoServerError, warning, "no server serves the pool", "beluga serve {options}"),
    _Rule(
        NoLaneError,
        warning,
        "all {lanes} lanes are taken: no other client can attach, unless the pool is created again",
        "beluga pool create --force --lanes {more} {paths}",
    ),
    _Rule(
        CallTimeoutError,
        error,
        "the pool names a server that does not answer: it died, or hangs; another can take over",
        "beluga serve {options}",
    ),
    _Rule(BootIdError, error, "{failure}", _SHOW_BOOT_ID),
    _Rule(RuntimeDirError, error, "{failure}", "{share}"),
    _Rule(BelugaError, unknown, "{failure}", "beluga doctor {options} --host N"),
)
_OF_HOST = (
    _Rule(BootIdError, unknown, "{failure}", _SHOW_BOOT_ID),
    _Rule(HostClashError, error, "{failure}", "give every machine its own number: --host N"),
    _Rule(
        SecondHostError,
        error,
        "{failure}",
        "beluga pool create --force --coherence software {paths}",
    ),
    _Rule(NoServerError, unknown, "no server serves the pool", "beluga serve {options}"),
    _Rule(BelugaError, unknown, "{failure}", "beluga doctor {options} --host N"),
)


def _evaluate(machine: Machine, facts: PoolInspection, rules: Sequence[_Rule]) -> Verdict:
    """Return the verdict of the first judgment that matches the failure."""
    words = {
        "failure": str(facts.failure),
        "options": machine.pool.options,
        "paths": machine.pool.operands,
        "lanes": facts.lane_count,
        "more": 2 * facts.lane_count,
        "share": share_runtime_dir(),
    }
    for rule in rules:
        if isinstance(facts.failure, rule.failure):
            return rule.verdict(rule.text.format(**words), rule.fix.format(**words))
    return unknown(str(facts.failure), f"beluga ping {machine.pool.options}")


def check_server(machine: Machine) -> Verdict:
    """Attach to the pool's server for a moment."""
    facts = _facts(machine)
    if isinstance(facts, Verdict):
        return facts
    if facts.epoch is not None:
        return ok(f"a server answers, epoch {facts.epoch}")
    return _evaluate(machine, facts, _OF_SERVER)


def check_host(machine: Machine) -> Verdict:
    """Check for another machine with this host's number."""
    facts = _facts(machine)
    if isinstance(facts, Verdict):
        return facts
    if facts.epoch is not None:
        return ok(f"this machine is registered at the server as host {machine.pool.host or 0}")
    if facts.one_host and isinstance(facts.failure, NoServerError):
        return ok("a pool of hardware coherence has one host")
    return _evaluate(machine, facts, _OF_HOST)
