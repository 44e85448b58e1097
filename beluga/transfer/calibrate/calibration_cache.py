# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Store measurements of copies on this machine in the user's cache directory.

There is a file for each CPU model, set of instructions, kind of memory and coherence. A file is
replaced whole, so a reader sees the old one or the new one. A file that is damaged, or that belongs
to another machine, counts as missing.
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
from beluga.coherence import features, isa
from beluga.errors import EngineUnavailableError

if TYPE_CHECKING:
    from beluga.pool import Pool

_VERSION = 3


def may_measure() -> bool:
    """Return whether BELUGA_TUNING permits measurements.

    Raises :class:`~beluga.errors.EngineUnavailableError` if it is neither on nor off.
    """
    value = config.tuning()
    if value not in (None, "on", "off"):
        raise EngineUnavailableError(f"BELUGA_TUNING={value} is not on or off")
    return value != "off"


class CalibrationCache:
    """The file for a pool's kind of memory, which may not exist."""

    def __init__(self, pool: Pool) -> None:
        flushes = [name for name in ("clflushopt", "clwb") if name in features()]
        kinds = sorted({f"{device.kind} {device.coherence}" for device in pool.data_devices})
        self._machine = [_cpu_model(), isa(), *flushes, *kinds]
        digest = hashlib.sha256(json.dumps(self._machine).encode()).hexdigest()
        self.path = config.cache_dir() / f"copy-{digest[:16]}.json"

    def read(self, part: str) -> Any:
        """Return a part of the file, or None. The caller has to check the content."""
        return self._parts().get(part)

    def can_write(self) -> bool:
        """Return whether its directory exists or can be created."""
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        return os.access(self.path.parent, os.W_OK)

    def write(self, part: str, content: Any) -> None:
        """Write a part beside the others. Raises OSError if it cannot be written."""
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
