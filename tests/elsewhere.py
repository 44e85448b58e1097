# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A process of another host, imitated on this one: its runtime directory is another one.

A client of this boot that does not find the server's proof there is refused, so names like those of
the proofs that there are stand in the directory: nobody holds them, and the server finds none of
the client's.
"""

from __future__ import annotations

from pathlib import Path


def imitate(real: Path, elsewhere: Path) -> Path:
    """``elsewhere``, made if need be, with the names of the proofs in the ``real`` directory."""
    elsewhere.mkdir(exist_ok=True)
    for proof in real.glob("alive-*"):
        (elsewhere / proof.name).touch()
    return elsewhere
