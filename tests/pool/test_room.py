# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""How much room there is: the least of all limits, in a made-up proc and sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from refusal import refused

from beluga.errors import NoRoomError
from beluga.pool.create import limits, require_room, room

MIB = 1 << 20
NO_LIMIT_V1 = "9223372036854771712"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 8 GiB available, no control group, and tmp_path on a tmpfs."""
    root = tmp_path / "root"
    number = tmp_path.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    write(root / "proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB")
    write(root / "proc/self/mountinfo", f"1 0 {device} / /tmp rw shared:1 - tmpfs tmpfs rw")
    return root


def found(directory: Path, root: Path) -> dict[str, int]:
    return {limit.what: limit.size for limit in limits(directory, root=root)}


def group_v2(root: Path, name: str, limit: str, current: int, files: int = 0) -> None:
    group = root / "sys/fs/cgroup" / name
    write(group / "memory.max", limit)
    write(group / "memory.current", str(current))
    write(group / "memory.stat", f"anon 5\ninactive_file {files}\nactive_file 0\nshmem 7")


def test_free_space_is_limited_by_filesystem_and_memory(tmp_path: Path, root: Path) -> None:
    stat = os.statvfs(tmp_path)
    sizes = found(tmp_path, root)
    assert sizes["available memory"] == 8 << 30
    assert abs(sizes["the filesystem"] - stat.f_bavail * stat.f_frsize) < 64 * MIB
    assert len(sizes) == 2


def test_free_space_is_limited_by_every_parent_control_group(tmp_path: Path, root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/a/b/c")
    group_v2(root, "a", str(300 * MIB), 200 * MIB)
    group_v2(root, "a/b", "max", 10 * MIB)
    group_v2(root, "a/b/c", str(900 * MIB), 10 * MIB)
    sizes = found(tmp_path, root)
    assert sizes["the memory limit of control group a"] == 100 * MIB
    assert sizes["the memory limit of control group c"] == 890 * MIB
    assert room(tmp_path, root=root).size == 90 * MIB


def test_file_cache_of_a_control_group_counts_as_free(tmp_path: Path, root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/a")
    group_v2(root, "a", str(300 * MIB), 200 * MIB, files=150 * MIB)
    assert found(tmp_path, root)["the memory limit of control group a"] == 250 * MIB


def test_free_space_is_limited_by_the_containers_control_group(tmp_path: Path, root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/only/outside/sees/this")
    group_v2(root, ".", str(100 * MIB), 36 * MIB)
    assert found(tmp_path, root)["the memory limit of control group cgroup"] == 64 * MIB


def test_free_space_is_limited_by_cgroup_v1(tmp_path: Path, root: Path) -> None:
    write(root / "proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/x/y\n0::/")
    for name, limit in ((".", NO_LIMIT_V1), ("x", str(64 * MIB)), ("x/y", NO_LIMIT_V1)):
        group = root / "sys/fs/cgroup/memory" / name
        write(group / "memory.limit_in_bytes", limit)
        write(group / "memory.usage_in_bytes", str(24 * MIB))
        write(group / "memory.stat", f"total_inactive_file {10 * MIB}\ninactive_file 1")
    sizes = found(tmp_path, root)
    assert sizes["the memory limit of control group x"] == 50 * MIB
    assert len(sizes) == 3


def test_a_full_control_group_leaves_no_space(tmp_path: Path, root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/a")
    group_v2(root, "a", str(100 * MIB), 120 * MIB)
    assert room(tmp_path, root=root).size == 0


def test_free_huge_pages_are_the_reserved_ones(tmp_path: Path, root: Path) -> None:
    info = root / "proc/self/mountinfo"
    info.write_text(info.read_text().replace("- tmpfs", "- hugetlbfs"))
    page = os.statvfs(tmp_path).f_bsize
    write(root / f"sys/kernel/mm/hugepages/hugepages-{page >> 10}kB/free_hugepages", "30")
    assert found(tmp_path, root) == {"the number of free huge pages": 30 * page}


def test_too_little_room_is_refused_with_figures(tmp_path: Path, root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/a")
    group_v2(root, "a", str(64 * MIB), 0)
    require_room(56 * MIB, tmp_path, root=root)
    with refused(NoRoomError, "60 MiB", "57.6 MiB", "control group a", "smaller size"):
        require_room(60 * MIB, tmp_path, root=root)


@pytest.mark.parametrize("text", ["", "x", "a:b", "a - b", "MemAvailable: much", "0::/a\n\xff"])
def test_missing_kernel_files_are_ignored(tmp_path: Path, root: Path, text: str) -> None:
    for name in ("meminfo", "self/mountinfo", "self/cgroup"):
        (root / "proc" / name).write_bytes(text.encode("latin-1"))
    write(root / "sys/fs/cgroup/a/memory.max", str(300 * MIB))
    write(root / "sys/fs/cgroup/a/memory.current", str(200 * MIB))
    write(root / "sys/fs/cgroup/a/memory.stat", "inactive_file\nactive_file many")
    assert set(found(tmp_path, root)) <= {
        "the filesystem",
        "the memory limit of control group a",
    }
