# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Temporary folders of pools: the next process removes leftovers of killed ones, and nothing
else.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from beluga.pool import scratch_folder

HOLDER = """
import sys, time
from pathlib import Path
from beluga.pool import scratch_folder
with scratch_folder("test", Path(sys.argv[1])) as folder:
    (folder / "device.0").write_bytes(b"KV")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path):  # type: ignore[no-untyped-def]
    """A process that has a folder, until it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        yield child
        child.kill()


def folder_of(holder: subprocess.Popen[str]) -> Path:
    assert holder.stdout is not None
    return Path(holder.stdout.readline().strip())


def test_a_scratch_folder_is_removed_after_use(tmp_path: Path) -> None:
    with scratch_folder("test", tmp_path) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "device.0").write_bytes(b"KV")
        (folder / "below").mkdir()
    assert list(tmp_path.iterdir()) == []


def test_folders_of_a_killed_process_are_removed_by_the_next(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    left = folder_of(holder)
    holder.kill()
    holder.wait()
    assert left.exists()
    with scratch_folder("another", tmp_path):
        assert not left.exists()


def test_the_folder_of_a_running_process_is_kept(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    held = folder_of(holder)
    with scratch_folder("test", tmp_path) as own:
        assert (held / "device.0").exists()
        with scratch_folder("test", tmp_path):
            assert own.exists(), "this process holds its first one"


def test_a_folder_that_may_be_in_use_is_kept(tmp_path: Path) -> None:
    lock = "beluga-owner.lock"
    unmarked = tmp_path / "beluga-replay-1"
    unmarked.mkdir()
    (unmarked / "device.0").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in (lock, "mine"):
        (elsewhere / name).touch()
    (tmp_path / "beluga-link").symlink_to(elsewhere)
    linked = tmp_path / "beluga-replay-2"
    linked.mkdir()
    (linked / lock).symlink_to(elsewhere / lock)
    with scratch_folder("test", tmp_path):
        pass
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"beluga-replay-1", "beluga-replay-2", "beluga-link", "elsewhere"}
    assert (unmarked / "device.0").exists()
    assert {path.name for path in elsewhere.iterdir()} == {lock, "mine"}
