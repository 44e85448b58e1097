# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Checks of the pool, and of what earlier processes left on this machine."""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from beluga import config
from beluga.conventions import RUNTIME_ROOT
from beluga.doctor.hardware import quoted_command
from beluga.doctor.machine import (
    Machine,
    PoolInspection,
    UndeterminedError,
    Verdict,
    error,
    ok,
    unknown,
    warning,
    worst,
)
from beluga.errors import (
    BelugaError,
    BootIdError,
    CallTimeoutError,
    DeviceBusyError,
    DeviceMissingError,
    DevicePermissionError,
    DeviceSpecError,
    HostClashError,
    NoLaneError,
    NoServerError,
    PoolError,
    RuntimeDirError,
    SecondHostError,
)
from beluga.pool import (
    STRIPE_SIZE,
    DeviceSpec,
    PoolFile,
    dax_nodes,
    examine,
    find_pools,
    refuse_in_use,
    show_size,
    survey,
)

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
    users = "one host" if facts.one_host else "several hosts"
    kinds = sorted({device.coherence for device in facts.devices if device.holds != "metadata"})
    first = facts.devices[0]
    metadata = f", and {first.coherence} for metadata" if first.holds == "metadata" else ""
    return worst(verdicts, f"{' and '.join(kinds)} coherence{metadata}: the pool is for {users}")


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


_SHOWN = 5  # names in one line
_POOL_ID = re.compile(r"[0-9a-f]{32}")
_REMOVED = re.compile(  # the same line, for a deleted file
    r"^([0-9a-f]{1,16})-([0-9a-f]{1,16}) .* (/dev/shm/.*) \(deleted\)$", re.MULTILINE
)
_MAPPED = re.compile(  # a line of /proc/PID/maps: addresses, rights, offset, device, inode
    r"^\S+ \S+ \S+ ([0-9a-f]{1,3}):([0-9a-f]{1,5}) (\d{1,20})", re.MULTILINE
)


def share_runtime_dir(root: Path = Path("/")) -> str:
    """Return the command that gives several users one runtime directory."""
    export = f"export BELUGA_RUNTIME_DIR={RUNTIME_ROOT}"
    if (root / RUNTIME_ROOT.relative_to("/")).is_dir():
        return export
    return f"sudo install -d -m 2770 -g GROUP {RUNTIME_ROOT} && {export}"


def _own(machine: Machine) -> Iterator[Path]:
    """Yield the runtime directories that this user's processes may use, and their parents."""
    root, uid, folders = machine.root, machine.uid, list[Path]()
    if dax_nodes(root / "sys"):  # Only these have no device file next to them.
        folders += [root / "run/beluga", root / f"tmp/beluga-{uid}"]
        folders.append(root / f"run/user/{uid}/beluga")
    if (export := config.configured_runtime_root()) is not None:
        folders.append(export)
    for folder in folders:
        if folder.is_symlink() or folder.exists():
            yield folder
            yield from (path for path in _children(folder) if _POOL_ID.fullmatch(path.name))
    for folder in (root / "dev/shm", *_children(root / "dev/shm")):
        yield from (path for path in _children(folder) if path.suffix == ".run")


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []  # not a directory, or of another user


def _others(machine: Machine) -> Iterator[Path]:
    """Yield the directories of other users for the runtime directories of their pools."""
    if not dax_nodes(machine.root / "sys"):
        return
    folders = [*machine.root.glob("tmp/beluga-*"), *machine.root.glob("run/user/*/beluga")]
    for folder in sorted(folders):
        uid = folder.parent.name if folder.name == "beluga" else folder.name.removeprefix("beluga-")
        pools = [path for path in _children(folder) if _POOL_ID.fullmatch(path.name)]
        if pools and uid.isdecimal() and uid != str(machine.uid):
            yield folder


def check_runtime_dirs(machine: Machine) -> Verdict:
    """Check for runtime directories that this user's processes cannot use, or would not find."""
    verdicts = []
    for path in _own(machine):
        try:
            verdicts.append(_evaluate_own(machine, path))
        except FileNotFoundError:
            continue  # the file was removed meanwhile
        except OSError as failure:
            cause = f"{path} cannot be examined ({failure.strerror})"
            verdicts.append(unknown(cause, "sudo beluga doctor"))
    if others := list(_others(machine)):
        shown = _list([str(path) for path in others])
        verdicts.append(
            warning(
                f"other users' processes have lock files in {shown}; in one pool, they and this "
                "user's processes do not find each other",
                share_runtime_dir(machine.root),
            )
        )
    return worst(verdicts, "no directory of another user is in the way")


def _list(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _evaluate_own(machine: Machine, path: Path) -> Verdict:
    status = path.lstat()
    name = shlex.quote(str(path))
    if not stat.S_ISDIR(status.st_mode):
        return error(f"{path} is not a directory, so it cannot contain lock files", f"rm {name}")
    trusted = {machine.uid, 0}
    device = _device_of(path)
    closed = False  # to this user, like the pool's device
    if path.suffix == ".run" and device.exists():
        trusted.add(device.lstat().st_uid)
        closed = not os.access(device, os.R_OK | os.W_OK)
    # Users who may write to the configured directory are trusted.
    shared = config.configured_runtime_root() in (path, path.parent)
    if status.st_uid not in trusted and not shared:
        text = f"user {status.st_uid} has made {path}, where this user's lock files would lie"
        return error(text, f"sudo rm -r {name}")
    if not closed and not _may_enter(machine, status):
        return warning(
            f"{path} is user {status.st_uid}'s: this user's processes cannot use that pool",
            share_runtime_dir(machine.root),
        )
    return ok(str(path))


def _device_of(runtime_dir: Path) -> Path:
    """Return the device file of a runtime directory."""
    return runtime_dir.with_name(runtime_dir.name.removesuffix(".run").partition("@")[0])


def _may_enter(machine: Machine, status: os.stat_result) -> bool:
    if machine.uid in (0, status.st_uid):
        return True
    shift = 3 if status.st_gid in os.getgroups() else 0
    return status.st_mode >> shift & 3 == 3


def check_stale_pools(machine: Machine) -> Verdict:
    """Check for pools in /dev/shm that no process uses, except for the pool under examination."""
    shm = machine.root / "dev/shm"
    pools, closed = find_pools(shm) if shm.is_dir() else ([], [])
    named = {spec.real_path for spec in machine.pool.specs}
    others = [pool for pool in pools if not any(file.path.resolve() in named for file in pool)]
    mapped = _mapped(machine) if others else set()
    verdicts = []
    if stale := [pool for pool in others if not _used(pool, mapped, closed)]:
        verdicts.append(_stale(stale))
    if orphans := [path for path in _orphans(shm) if not _locked(path, closed)]:
        text = (
            f"runtime directories of files that are gone: {_list([str(path) for path in orphans])}"
        )
        shown = " ".join(shlex.quote(str(path)) for path in orphans[:_SHOWN])
        verdicts.append(warning(text, f"rm -r {shown}"))
    if removed := _serving_removed(machine):
        # Every process is listed: the memory is freed only when all of them have ended.
        names = ", ".join(f"process {pid} of {_list(paths)}" for pid, paths in removed.items())
        text = f"the files of pools in use were removed, their memory is not free: {names}"
        verdicts.append(warning(text, "kill " + " ".join(str(pid) for pid in removed)))
    if closed := [path for path in closed if _may_be_ours(path)]:
        names = _list([str(path) for path in closed])
        verdicts.append(unknown(f"this user may not read {names}", "sudo beluga doctor"))
    return worst(verdicts, f"{len(pools)} pools in /dev/shm, all of them in use")


def _used(pool: list[PoolFile], mapped: set[tuple[int, int]], closed: list[Path]) -> bool:
    """Return whether a process uses the pool. An unknown state counts as used."""
    folders = [file.runtime_dir for file in pool if file.runtime_dir is not None]
    return any(file.identity in mapped for file in pool) or any(
        _locked(folder, closed) for folder in folders
    )


def _may_be_ours(path: Path) -> bool:
    """Return whether an unreadable file has the name of a pool's file: other programs have files
    there, too."""
    runtime_dir = path.with_name(f"{path.name}.run")
    return (
        "beluga" in f"{path.parent.name}/{path.name}"
        or path.suffix == ".run"
        or runtime_dir.exists()
    )


def _locked(runtime_dir: Path, closed: list[Path]) -> bool:
    """Return whether a process holds a lock in the directory; an unreadable one is added to
    closed."""
    try:
        if runtime_dir.exists() and not os.access(runtime_dir, os.R_OK | os.X_OK):
            closed.append(runtime_dir)
            return True
        refuse_in_use(runtime_dir)
    except DeviceBusyError:
        return True
    except (OSError, PoolError):
        closed.append(runtime_dir)
        return True
    return False


def _stale(pools: list[list[PoolFile]]) -> Verdict:
    files = [file for pool in pools for file in pool]
    size = show_size(sum(file.size for file in files))
    shown = _list(
        [
            f"{pool[0].path} (user {pool[0].owner}, {show_size(sum(file.size for file in pool))})"
            for pool in pools
        ]
    )
    # The command destroys only pools in the message; the next run shows the rest.
    named = [file for pool in pools[:_SHOWN] for file in pool]
    paths = " ".join(shlex.quote(str(file.path)) for file in named)
    missing = sum(pool[0].device_count - len(pool) for pool in pools[:_SHOWN] if pool[0].pool_id)
    damaged = sum(file.pool_id is None for file in named)  # a damaged file may belong to any pool
    force = " --force" if missing > damaged else ""
    return warning(
        f"no process uses {len(pools)} pools, which take {size}: {shown}",
        f"beluga pool destroy --yes{force} {paths}",
    )


def _orphans(shm: Path) -> list[Path]:
    """Return the runtime directories whose device is gone."""
    folders = [shm, *_children(shm)]
    paths = [path for folder in folders for path in _children(folder) if path.suffix == ".run"]
    try:
        return [path for path in paths if path.is_dir() and not _device_of(path).exists()]
    except OSError:
        return []  # a folder that this user may list but not search


def _serving_removed(machine: Machine) -> dict[int, list[str]]:
    """Return the removed files of pools that processes still map, by process."""
    by_process = {}
    for name in machine.names("proc"):
        if not name.isdecimal():
            continue
        try:
            maps = machine.read(f"proc/{name}/maps")
        except UndeterminedError:
            continue
        removed = _REMOVED.findall(maps) if "/beluga/_core." in maps else []
        paths = {path for low, high, path in removed if int(high, 16) - int(low, 16) >= STRIPE_SIZE}
        if paths:
            by_process[int(name)] = sorted(paths)
    return by_process


def _mapped(machine: Machine) -> set[tuple[int, int]]:
    """Return the files (device, inode) that processes have mapped, as far as this user may see."""
    identities: set[tuple[int, int]] = set()
    for name in machine.names("proc"):
        if not name.isdecimal():
            continue
        try:
            maps = machine.read(f"proc/{name}/maps")
        except UndeterminedError:
            continue  # ended, or another user's process, whose use is shown by its lock
        for major, minor, inode in _MAPPED.findall(maps):
            identities.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return identities
