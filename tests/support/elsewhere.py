# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Simulates a process of another host by another runtime directory. A client of this boot that does
not find the server's liveness lock there is refused, so the directory has files with the names of
the existing locks: no process holds them, and the server does not find the client's lock.
"""

from pathlib import Path


def imitate(real: Path, elsewhere: Path) -> Path:
    """Create the directory ``elsewhere``, if needed, with the names of the liveness locks in the
    ``real`` directory.
    """
    elsewhere.mkdir(exist_ok=True)
    for lock in real.glob("alive-*"):
        (elsewhere / lock.name).touch()
    return elsewhere
