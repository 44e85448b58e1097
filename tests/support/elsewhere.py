# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A process of another host, imitated on this one by another runtime directory.

A client of this boot that does not find the server's liveness lock there is refused, so names like
those of the locks that exist stand in the directory: no process holds them, and the server finds
none of the client's.
"""

from __future__ import annotations

from pathlib import Path


def imitate(real: Path, elsewhere: Path) -> Path:
    """Make ``elsewhere``, if need be, with the names of the liveness locks in the ``real``
    directory.
    """
    elsewhere.mkdir(exist_ok=True)
    for lock in real.glob("alive-*"):
        (elsewhere / lock.name).touch()
    return elsewhere
