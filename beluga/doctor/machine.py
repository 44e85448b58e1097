# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The inputs of the checks: files below a root, and this process. Tests use their own root."""

from __future__ import annotations

import importlib
import os
import platform
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from beluga.coherence import features
from beluga.doctor.finding import UndeterminedError
from beluga.doctor.pool_look import PoolLook
from beluga.transfer import ENGINES

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
    found = os.statvfs(folder)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


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
        _, opened, rest = text.partition("[")
        word, closed, _ = rest.partition("]")
        if not (opened and closed and word.isidentifier()):
            raise UndeterminedError(f"/{name} contains {text[:40]!r}", f"cat /{name}")
        return word

    def may_use(self, name: str) -> bool:
        """Return whether this user may read and write a file below the root."""
        return os.access(self.root / name, os.R_OK | os.W_OK)
