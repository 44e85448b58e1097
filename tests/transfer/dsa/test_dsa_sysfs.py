# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Work queues are found in sysfs, and malformed trees raise no errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from beluga.errors import EngineUnavailableError
from beluga.pool import STRIPE_SIZE, Pool
from beluga.transfer import DsaEngine
from beluga.transfer.dsa import nearest, open_device, why_none, work_queues

ENABLED = {
    "mode": "shared",
    "type": "user",
    "state": "enabled",
    "size": "16",
    "max_transfer_size": "2097152",
    "max_batch_size": "32",
    "block_on_fault": "1",
}


def queue(root: Path, name: str, **changes: str) -> None:
    folder = root / name
    folder.mkdir(parents=True)
    for file, text in (ENABLED | changes).items():
        (folder / file).write_text(f"{text}\n")


def device(root: Path, name: str, node: int) -> None:
    (root / name).mkdir(parents=True)
    (root / name / "numa_node").write_text(f"{node}\n")


def test_the_attributes_of_a_queue_are_read(tmp_path: Path) -> None:
    device(tmp_path, "dsa2", 1)
    queue(tmp_path, "wq2.3")
    (found,) = work_queues(tmp_path)
    assert (found.name, found.mode, found.depth, found.node) == ("wq2.3", "shared", 16, 1)
    assert (found.size_max, found.batch_max, found.block_on_fault) == (2 << 20, 32, True)
    assert found.fault is None


def test_queues_are_ordered_by_node_then_mode_then_depth(tmp_path: Path) -> None:
    for number, node in enumerate((0, 1, -1)):
        device(tmp_path, f"dsa{number}", node)
    queue(tmp_path, "wq0.0", mode="dedicated", size="64")
    queue(tmp_path, "wq1.0", size="8")
    queue(tmp_path, "wq1.1", size="32")
    queue(tmp_path, "wq1.2", mode="dedicated", size="4")
    queue(tmp_path, "wq2.0", size="128")
    queue(tmp_path, "wq10.0", size="1", state="disabled")
    names = [found.name for found in nearest(work_queues(tmp_path), {1})]
    assert names == ["wq1.2", "wq1.1", "wq1.0", "wq0.0", "wq2.0"]
    assert [found.name for found in work_queues(tmp_path)][-1] == "wq10.0"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"type": "kernel"}, "wq0.0 is of type kernel, not user"),
        ({"type": "none"}, "wq0.0 is of type none, not user"),
        ({"state": "disabled"}, "wq0.0 is disabled"),
        ({"mode": "strange"}, "wq0.0 has no mode or no size"),
        ({"size": "0"}, "wq0.0 has no mode or no size"),
        ({"max_transfer_size": "much"}, "wq0.0 has no mode or no size"),
    ],
)
def test_an_unusable_queue_has_its_reason(
    tmp_path: Path, changes: dict[str, str], expected: str
) -> None:
    queue(tmp_path, "wq0.0", **changes)
    found = work_queues(tmp_path)
    assert nearest(found, set()) == []
    assert expected in why_none(found, tmp_path)
    assert "accel-config enable-wq" in why_none(found, tmp_path)


def test_unusual_sysfs_trees_raise_no_error(tmp_path: Path) -> None:
    assert work_queues(tmp_path / "absent") == []
    assert "intel_iommu=on,sm_on" in why_none([], tmp_path / "absent")
    assert work_queues(tmp_path) == []
    assert "no DSA device has a work queue" in why_none([], tmp_path)
    (tmp_path / "wq0.0").mkdir()
    (tmp_path / "wq0.0" / "size").write_bytes(b"\xff\xfe")
    (tmp_path / "wq0.0" / "mode").mkdir()
    (tmp_path / "wqx.1").mkdir()
    (tmp_path / "engine0.0").mkdir()
    (tmp_path / "wq1.0").write_text("a file")
    assert [found.fault for found in work_queues(tmp_path)] == [
        "wq0.0 is of type none, not user",
        "wq1.0 is of type none, not user",
    ]


@pytest.fixture
def pool(shm: Path) -> Pool:
    return Pool.create([shm / "device"], device_size=8 * STRIPE_SIZE, sparse=True)


def test_a_device_file_that_does_not_open_is_named(pool: Pool, tmp_path: Path) -> None:
    queue(tmp_path / "sys", "wq0.0")
    (tmp_path / "dev").mkdir()
    with pool, pytest.raises(EngineUnavailableError, match=r"wq0\.0: No such file.*CAP_SYS_RAWIO"):
        open_device(pool, sysfs=tmp_path / "sys", devices=tmp_path / "dev")


def test_without_a_device_the_error_names_the_missing_requirement(pool: Pool) -> None:
    with pool:
        if nearest(work_queues(), set()):
            pytest.skip("there is a DSA")
        with pytest.raises(EngineUnavailableError) as refused:
            DsaEngine(pool)
        assert "\n" not in str(refused.value)
