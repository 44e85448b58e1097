# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The inputs of the checks (files below a root, this process, the pool), and their results."""

from __future__ import annotations

import importlib
import os
import platform
import resource
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from beluga.coherence import features
from beluga.errors import BelugaError, NoDefaultPoolError, NoServerError
from beluga.pool import DeviceSpec, DeviceView, Pool, SpecLike, default_specs, stored_specs
from beluga.rpc import Client
from beluga.transfer import ENGINES

Level: TypeAlias = Literal["ok", "warning", "error"]

_LEVELS: tuple[Level, ...] = ("ok", "warning", "error")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. An unknown result is a warning."""

    name: str
    level: Level
    text: str
    fix: str  # the command that fixes it; "" if the check passed


class Verdict(NamedTuple):
    """A finding without the name of its check."""

    level: Level
    text: str
    fix: str


def ok(text: str) -> Verdict:
    """Return the verdict of a passed check."""
    return Verdict("ok", text, "")


def warning(text: str, fix: str) -> Verdict:
    """Return a verdict about lost speed or a possible later failure."""
    return Verdict("warning", text, fix)


def error(text: str, fix: str) -> Verdict:
    """Return a verdict about something that breaks Beluga or its results."""
    return Verdict("error", text, fix)


def unknown(text: str, fix: str) -> Verdict:
    """Return the verdict of an unknown result, with the command that determines it."""
    return warning(f"unknown: {text}", fix)


class UndeterminedError(Exception):
    """Raised inside a check whose result cannot be determined."""

    def __init__(self, text: str, fix: str) -> None:
        super().__init__(text)
        self.fix = fix


def worst(verdicts: Sequence[Verdict], well: str) -> Verdict:
    """Join several verdicts. ``well`` is the text if all of them are ok."""
    problems = [verdict for verdict in verdicts if verdict.level != "ok"]
    if not problems:
        return ok(well)
    level = max((verdict.level for verdict in problems), key=_LEVELS.index)
    fixes = dict.fromkeys(verdict.fix for verdict in problems)
    return Verdict(level, "; ".join(verdict.text for verdict in problems), " && ".join(fixes))


_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class PoolInspection:
    """The state of an open pool. ``failure`` is why there is no session with its server."""

    devices: tuple[DeviceView, ...]
    one_host: bool
    lane_count: int
    epoch: int | None  # of the server that replied
    failure: BelugaError | OSError | None


class PoolLook:
    """A pool by the paths of its devices, which may be wrong. It is opened on first use."""

    def __init__(
        self,
        paths: tuple[SpecLike, ...] = (),
        *,
        host: int | None = None,
        failure: BelugaError | None = None,
        fix: str = "",
    ) -> None:
        self.paths = tuple(map(str, paths))
        self.host = host
        self.failure = failure  # why there is no default pool
        self.fix = fix  # the command that fixes that

    @classmethod
    def named(cls, paths: list[str] | None, host: int | None) -> PoolLook:
        """Return the pool of these paths, or the default pool, if there is one."""
        if paths:
            return cls(tuple(paths), host=host)
        try:
            stored = stored_specs()
        except BelugaError as error:  # the stored default pool is damaged
            return cls(host=host, failure=error, fix="beluga umount")
        try:
            return cls(tuple(default_specs()), host=host)
        except NoDefaultPoolError as error:
            if not stored:
                return cls(host=host)
            again = " ".join(shlex.quote(str(spec)) for spec in stored)
            return cls(host=host, failure=error, fix=f"beluga mount --create {again}")
        except BelugaError as error:
            return cls(host=host, failure=error, fix="unset BELUGA_POOL")

    @property
    def options(self) -> str:
        """The pool's devices as options of a command."""
        return " ".join(f"--pool {shlex.quote(path)}" for path in self.paths)

    @property
    def operands(self) -> str:
        """The pool's devices as operands of a command."""
        return " ".join(map(shlex.quote, self.paths))

    @cached_property
    def specs(self) -> list[DeviceSpec]:
        """The devices, without invalid specifications."""
        specs = []
        for path in self.paths:
            try:
                specs.append(DeviceSpec.parse(path))
            except BelugaError:
                continue
        return specs

    @cached_property
    def facts(self) -> PoolInspection | BelugaError | OSError:
        """The pool's state, or why it cannot be opened. A session is opened briefly."""
        try:
            with Pool.open(self.paths) as pool:
                epoch, failure = _attach(pool, self.host)
                lane_count = pool.geometry.lane_count
                return PoolInspection(pool.devices, pool.one_host, lane_count, epoch, failure)
        except (BelugaError, OSError) as error:
            return error


def _attach(pool: Pool, host: int | None) -> tuple[int | None, BelugaError | OSError | None]:
    """Attach to the pool's server and detach."""
    if pool.one_host and not pool.has_runtime_dir:  # A session would create it, for this user.
        return None, NoServerError("no process of this host has used the pool yet")
    try:
        with Client(pool, host=host, timeout_s=_WAIT_S) as client:
            return client.stat().epoch, None
    except (BelugaError, OSError) as error:
        return None, error


_PIECE = 64 << 10  # bytes; files in /proc/sys reject reads of many MiB


def _limit(kind: int) -> int | None:
    """Return this process's soft limit; None if there is none."""
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _version(distribution: str) -> str | None:
    """Return the version of an installed package, which is not imported."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _why_no_import(module: str) -> str | None:
    """Import a module; return why that fails."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken package may raise anything
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def _usage(folder: Path) -> tuple[int, int]:
    """Return the size and the free bytes of a folder's filesystem."""
    filesystem = os.statvfs(folder)
    return filesystem.f_blocks * filesystem.f_frsize, filesystem.f_bavail * filesystem.f_frsize


@dataclass(frozen=True)
class Machine:
    """This machine, or a test's fake."""

    root: Path = Path("/")
    pool: PoolLook = field(default_factory=PoolLook)
    features: frozenset[str] = field(default_factory=features)
    arch: str = field(default_factory=platform.machine)
    uid: int = field(default_factory=os.geteuid)
    limit: Callable[[int], int | None] = _limit
    version: Callable[[str], str | None] = _version
    why_no_import: Callable[[str], str | None] = _why_no_import
    why_no_engine: Callable[[str], str | None] = lambda name: ENGINES[name].why_none()
    usage: Callable[[Path], tuple[int, int]] = _usage

    def read(self, name: str) -> str:
        """Return the text of the file ``name`` below the root. Raises UndeterminedError."""
        text = self.read_if(name)
        if text is None:
            kind, _, _ = name.partition("/")
            kinds = {"proc": "proc", "sys": "sysfs"}
            fix = f"sudo mount -t {kinds[kind]} none /{kind}" if kind in kinds else f"ls -l /{name}"
            raise UndeterminedError(f"there is no /{name}", fix)
        return text

    def read_if(self, name: str) -> str | None:
        """Do as :meth:`read`, but return None if the file does not exist."""
        try:
            with (self.root / name).open("rb", buffering=0) as file:
                text = b"".join(iter(lambda: file.read(_PIECE), b""))
                return text.decode(errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError:
            raise UndeterminedError(
                f"this user may not read /{name}", "sudo beluga doctor"
            ) from None
        except OSError as error:
            raise UndeterminedError(
                f"/{name} cannot be read ({error.strerror})", f"ls -l /{name}"
            ) from None

    def number(self, name: str) -> int:
        """Return the number that a file contains. Raises UndeterminedError."""
        text = self.read(name)
        if not (text.isascii() and text.isdecimal() and len(text) < 20):
            raise UndeterminedError(f"/{name} contains {text[:40]!r}", f"cat /{name}")
        return int(text)

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder below the root, or nothing if it does not exist.

        Raises UndeterminedError.
        """
        try:
            return sorted(path.name for path in (self.root / folder).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise UndeterminedError(
                f"/{folder} cannot be read ({error.strerror})", "sudo beluga doctor"
            ) from None

    def cpu_flags(self) -> frozenset[str]:
        """Return the flags of the first CPU in /proc/cpuinfo. Raises UndeterminedError."""
        for line in self.read("proc/cpuinfo").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):  # of x86-64, of aarch64
                return frozenset(value.split())
        return frozenset()

    def chosen(self, name: str) -> str:
        """Return the word in brackets of a file such as "always [madvise] never"."""
        text = self.read(name)
        _, opened, following = text.partition("[")
        word, closed, _ = following.partition("]")
        if not (opened and closed and word.isidentifier()):
            raise UndeterminedError(f"/{name} contains {text[:40]!r}", f"cat /{name}")
        return word

    def may_use(self, name: str) -> bool:
        """Return whether this user may read and write a file below the root."""
        return os.access(self.root / name, os.R_OK | os.W_OK)
