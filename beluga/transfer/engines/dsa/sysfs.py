# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Finds this machine's DSA work queues in sysfs.

The kernel shows every work queue under ``/sys/bus/dsa/devices``, enabled or not, with its
configuration by ``accel-config`` (kernel documentation, ``ABI/stable/sysfs-driver-dma-idxd``).
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

SYSFS = Path("/sys/bus/dsa/devices")
DEVICES = Path("/dev/dsa")

CONFIGURE = (
    "accel-config config-wq dsa0/wq0.0 --mode=shared --type=user --driver-name=user "
    "--name=beluga --group-id=0 --wq-size=32 --threshold=32 --max-batch-size=32 --priority=10 "
    "&& accel-config config-engine dsa0/engine0.0 --group-id=0 "
    "&& accel-config enable-device dsa0 && accel-config enable-wq dsa0/wq0.0"
)
"""The commands by which root makes a queue, once per boot."""

_QUEUE_NAME = re.compile(r"wq(\d+)\.(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class WorkQueue:
    """The configuration of a work queue."""

    name: str  # wq0.1
    mode: str  # shared or dedicated
    type: str  # user, kernel, mdev or none
    state: str  # enabled, disabled
    depth: int  # descriptors that it holds
    size_max: int  # bytes of one transfer
    batch_max: int  # descriptors of one batch
    block_on_fault: bool
    node: int | None  # the NUMA node of its device

    @property
    def fault(self) -> str | None:
        """The reason why a program cannot submit to it, or None."""
        if self.type != "user":
            return f"{self.name} is of type {self.type or 'none'}, not user"
        if self.state != "enabled":
            return f"{self.name} is {self.state or 'not enabled'}"
        if self.mode not in ("shared", "dedicated") or self.depth < 1 or self.size_max < 1:
            return f"{self.name} has no mode or no size"
        return None


def work_queues(root: Path = SYSFS) -> list[WorkQueue]:
    """Return every work queue under ``root``, by name; unreadable numbers are zero."""
    if not root.is_dir():
        return []
    found = []
    for path in root.iterdir():
        if match := _QUEUE_NAME.fullmatch(path.name):
            found.append((int(match[1]), int(match[2]), _read(path, root / f"dsa{match[1]}")))
    return [queue for _, _, queue in sorted(found, key=lambda entry: entry[:2])]


def nearest(queues: list[WorkQueue], nodes: set[int]) -> list[WorkQueue]:
    """Return the usable queues: near ``nodes`` first, then dedicated, then deep ones."""
    usable = [queue for queue in queues if queue.fault is None]
    return sorted(
        usable,
        key=lambda queue: (queue.node not in nodes, queue.mode != "dedicated", -queue.depth),
    )


def why_no_queue(root: Path = SYSFS) -> str | None:
    """Return in one line why no work queue of this machine can be used, as far as known without
    opening one."""
    queues = work_queues(root)
    return None if nearest(queues, set()) else why_none(queues, root)


def why_none(queues: list[WorkQueue], root: Path = SYSFS) -> str:
    """Return in one line why there is no queue, and how to make one."""
    if not root.is_dir():
        return (
            f"there is no {root}: DSA needs a CPU that has it (Sapphire Rapids or later), "
            "intel_iommu=on,sm_on on the kernel's command line and the idxd driver"
        )
    if not queues:
        return f"no DSA device has a work queue under {root}; as root: {CONFIGURE}"
    faults = "; ".join(queue.fault for queue in queues if queue.fault is not None)
    return f"no DSA work queue can be used ({faults}); as root: {CONFIGURE}"


def _read(path: Path, device: Path) -> WorkQueue:
    node = _number(device / "numa_node", default=-1)
    return WorkQueue(
        name=path.name,
        mode=_text(path / "mode"),
        type=_text(path / "type"),
        state=_text(path / "state"),
        depth=_number(path / "size"),
        size_max=_number(path / "max_transfer_size"),
        batch_max=_number(path / "max_batch_size"),
        block_on_fault=_number(path / "block_on_fault") == 1,
        node=None if node < 0 else node,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path, default: int = 0) -> int:
    try:
        return int(_text(path), 0)
    except ValueError:
        return default
