# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What was measured of copying on this machine, kept in the user's cache directory.

A file for each CPU model, instructions in use, kind of memory and coherence. It is replaced whole,
so that who reads it meanwhile, or writes another, sees one or the other; one that is damaged or
another machine's counts as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beluga import config
from beluga.errors import EngineUnavailableError
from beluga.primitives import features, isa

if TYPE_CHECKING:
    from beluga.pool import Pool

_VERSION = 2


def may_measure() -> bool:
    """Unless BELUGA_TUNING is off. Raises :class:`~beluga.errors.EngineUnavailableError` for one
    that is neither on nor off."""
    told = config.tuning()
    if told not in (None, "on", "off"):
        raise EngineUnavailableError(f"BELUGA_TUNING={told} is not on or off")
    return told != "off"


class CalibrationCache:
    """The file for a pool's kind of memory, which may not be there."""

    def __init__(self, pool: Pool) -> None:
        flushes = [name for name in ("clflushopt", "clwb") if name in features()]
        kinds = sorted({f"{device.kind} {device.coherence}" for device in pool.devices})
        self._machine = [_cpu_model(), isa(), *flushes, *kinds]
        digest = hashlib.sha256(json.dumps(self._machine).encode()).hexdigest()
        self.path = config.cache_dir() / f"copy-{digest[:16]}.json"

    def read(self, part: str) -> Any:
        """A part of it, as JSON has it, to be checked by who reads it; None if there is none."""
        return self._parts().get(part)

    def can_write(self) -> bool:
        """Is there a directory for it, or can one be made?"""
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        return os.access(self.path.parent, os.W_OK)

    def write(self, part: str, content: Any) -> None:
        """Put a part beside the others. Raises OSError where it cannot be kept."""
        whole = {"version": _VERSION, "machine": self._machine, **self._parts(), part: content}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        number, draft = tempfile.mkstemp(prefix=self.path.stem, dir=self.path.parent)
        try:
            with os.fdopen(number, "w") as file:
                json.dump(whole, file)
            Path(draft).replace(self.path)
        except OSError:
            Path(draft).unlink(missing_ok=True)
            raise

    def _parts(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text())
            right = (found.pop("version"), found.pop("machine")) == (_VERSION, self._machine)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}
        return dict(found) if right else {}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return " ".join(line.split(":", 1)[1].split())
    return "unknown"
