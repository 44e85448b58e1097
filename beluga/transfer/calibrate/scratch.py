# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Make a pool to measure copies in, so that no block of a user's pool is overwritten.

The pool lies in this host's memory. A CXL device is slower, so settings that are measured here are
correct there, too, but may not be optimal.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from beluga.pool import STRIPE_SIZE, Pool, scratch_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

_STRIPES = 16


@contextlib.contextmanager
def scratch_pool(like: Pool) -> Iterator[Pool]:
    """Make a small pool with the coherence of ``like``, which exists within this context.

    Raises OSError or a :class:`~beluga.errors.BelugaError` if there is no space.
    """
    coherent = all(device.coherence == "hardware" for device in like.data_devices)
    shared = Path("/dev/shm")  # noqa: S108  memory, where there is one
    parent = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    with (
        scratch_folder("scratch", parent) as folder,
        Pool.create(
            [folder / "scratch"],
            device_size=_STRIPES * STRIPE_SIZE,
            coherence="hardware" if coherent else "software",
            sparse=True,
        ) as scratch,
    ):
        yield scratch
