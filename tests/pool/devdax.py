# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A made-up sysfs in which some character device of this machine is a devdax node."""

import os
from pathlib import Path

MIB = 1 << 20


def fake_devdax(
    root: Path,
    node: str,
    *,
    driver: str | None = "device_dax",
    size: int = 256 * MIB,
    align: int = 2 * MIB,
) -> Path:
    """Make ``root``, with ``node`` as dax0.0."""
    entry = root / "bus/dax/devices/dax0.0"
    entry.mkdir(parents=True)
    number = Path(node).stat().st_rdev
    (entry / "dev").write_text(f"{os.major(number)}:{os.minor(number)}\n")
    (entry / "size").write_text(f"{size}\n")
    (entry / "align").write_text(f"{align}\n")
    (entry / "numa_node").write_text("1\n")
    if driver is not None:
        (root / "bus/dax/drivers" / driver).mkdir(parents=True)
        (entry / "driver").symlink_to(root / "bus/dax/drivers" / driver)
    return root
