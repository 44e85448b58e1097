# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The space for files in a directory, which is checked before any file is created.

A file in memory that outgrows the memory causes no error at creation, but a SIGBUS or an OOM kill
later. So the smallest limit applies: the filesystem's, the machine's, and that of every control
group from this process's up to the root. A tenth is reserved for other users.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from beluga.errors import NoRoomError
from beluga.pool.spec import show_size

_UNLIMITED = 1 << 60  # cgroup v1 writes a huge number for "max"


@dataclass(frozen=True, slots=True)
class Limit:
    """The bytes that are still available, and the name of the limit."""

    what: str
    size: int


def room(directory: Path, *, root: Path = Path("/")) -> Limit:
    """Return the smallest limit for new files in ``directory``, less a tenth.

    ``root`` is where proc and sys are found.
    """
    least = min(limits(directory, root=root), key=lambda limit: limit.size)
    return Limit(least.what, max(0, least.size) // 10 * 9)


def require_room(size: int, directory: Path, *, root: Path = Path("/")) -> None:
    """Raise NoRoomError unless ``size`` more bytes fit into ``directory``."""
    there = room(directory, root=root)
    if size > there.size:
        raise NoRoomError(
            f"{show_size(size)} do not fit in {directory}: {there.what} leaves "
            f"{show_size(there.size)} (a tenth is reserved); use a smaller size or another "
            "directory"
        )


def limits(directory: Path, *, root: Path = Path("/")) -> list[Limit]:
    """Return everything that limits files in ``directory``."""
    kind = filesystem(directory, root=root)
    if kind == "hugetlbfs":  # The pages were reserved at boot, so only their number matters.
        return [_huge_pages(directory, root)]
    stat = os.statvfs(directory)
    found = [Limit("the filesystem", stat.f_bavail * stat.f_frsize)]
    available = _available_memory(root)
    if available is not None:
        found.append(Limit("available memory", available))
    found.extend(_control_groups(root))
    return found


def filesystem(directory: Path, *, root: Path = Path("/")) -> str:
    """Return the type of the filesystem that holds ``directory``, or "unknown"."""
    number = directory.stat().st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    kind = "unknown"
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2:3] == [wanted] and after.split():
            kind = after.split()[0]
    return kind


def _huge_pages(directory: Path, root: Path) -> Limit:
    stat = os.statvfs(directory)
    page = stat.f_bsize
    free = _number(root / f"sys/kernel/mm/hugepages/hugepages-{page >> 10}kB/free_hugepages") or 0
    if stat.f_blocks > 0:  # a mount without its own limit reports 0
        free = min(free, stat.f_bavail)
    return Limit("the number of free huge pages", free * page)


def _available_memory(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable" and (size := _whole(*value.split()[:1])) is not None:
            return size << 10
    return None


def _control_groups(root: Path) -> Iterator[Limit]:
    """Yield the limit of each group above this process that limits memory, of cgroup v2 and v1."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, separated, path = rest.partition(":")
        if not (number and separated):
            continue
        if controllers == "":
            mounts, names = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], _V2
        elif "memory" in controllers.split(","):
            mounts, names = ["sys/fs/cgroup/memory"], _V1
        else:
            continue
        for mount in mounts:
            top = root / mount
            group = top / path.strip("/")
            # A container may show a path that exists only outside, so the walk continues to the
            # parents.
            for place in (group, *group.parents):
                if place != top and top not in place.parents:
                    break
                yield from _group_limit(place, names)


@dataclass(frozen=True, slots=True)
class _Names:
    limit: str
    usage: str
    cache: tuple[str, str]  # fields of memory.stat whose pages the kernel can drop


_V2 = _Names("memory.max", "memory.current", ("active_file", "inactive_file"))
_V1 = _Names(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


def _group_limit(place: Path, names: _Names) -> Iterator[Limit]:
    limit, usage = _number(place / names.limit), _number(place / names.usage)
    if limit is None or usage is None or limit >= _UNLIMITED:
        return
    for line in _text(place / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in names.cache:
            usage -= _whole(value) or 0
    yield Limit(f"the memory limit of control group {place.name}", limit - usage)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    return _whole(_text(path).strip())


def _whole(text: str = "") -> int | None:
    """Return the kernel's number, or None if the text is not a number."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 20 else None
