# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Finds processes that have a device mapped.

The liveness locks of a pool are next to its first device. Another device of the pool does not
record the first one's path, so /proc is searched for processes that map this one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from beluga.errors import DeviceBusyError
from beluga.pool.device import Device

_LINE = re.compile(  # of /proc/PID/maps: addresses, rights, offset, device, inode
    r"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+)", re.MULTILINE
)


def refuse_mapped(device: Device) -> None:
    """Raise DeviceBusyError if another process of this host has a part of the device mapped.

    Only root can see processes of other users.
    """
    status = device.spec.path.stat()
    begin, end = device.spec.offset, device.spec.offset + device.size
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if maps.parent.name == str(os.getpid()):
            continue
        try:
            lines = _LINE.findall(maps.read_text(errors="replace"))
        except OSError:
            continue  # the process has ended, or belongs to another user
        for low, high, offset, major, minor, inode in lines:
            first = int(offset, 16)
            if (
                int(inode) == status.st_ino
                and os.makedev(int(major, 16), int(minor, 16)) == status.st_dev
                and first < end
                and begin < first + int(high, 16) - int(low, 16)
            ):
                raise DeviceBusyError(
                    f"process {maps.parent.name} has {device} in its memory; stop the server and "
                    "the clients of its pool"
                )
