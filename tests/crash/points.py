# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The crash points that the C core's source names (``csrc/coherence/crash_point.h``)."""

from __future__ import annotations

import re
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"


def named(kind: str = "point|line") -> list[str]:
    """Return their names, sorted, each as often as it occurs in the source."""
    return sorted(
        name
        for path in CSRC.rglob("*.[ch]")
        if path.name != "crash_point.h"
        for name in re.findall(rf'bl_crash_(?:{kind})\("([^"]+)"', path.read_text())
    )
