# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A file of workers that is read repeatedly: workers added to it join, and removed ones are
drained. A worker whose new settings do not work keeps its old ones.

The file need not be written atomically. A read may find it truncated, because another program is
rewriting it. So a new complete line counts at once, but removed or changed lines count only when
the file has been unchanged for ``SETTLED_LOOKS`` reads. A file that is unreadable, invalid or has
no line changes nothing: the line ``none`` removes all workers.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from beluga.errors import RouterError
from beluga.gateway.fleet import Fleet
from beluga.gateway.settings import EngineSpec, read_workers, workers_text

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0
SETTLED_LOOKS = 3
"""Further reads with the same text after which the writer is assumed to be done."""


class WorkersFile:
    """Applies a file. It drains only workers that came from the file."""

    def __init__(self, path: Path, fleet: Fleet) -> None:
        self._path = path
        self._fleet = fleet
        self._specs: tuple[EngineSpec, ...] = ()
        self._text = ""
        self._looks = 0  # consecutive reads of the same text
        self._complained = ""

    def read(self) -> None:
        """Read the file and apply it. Raises RouterError."""
        specs = self._wanted()
        failed = self._fleet.follow(specs, self._specs)
        kept = [old for old in self._specs if any(new.url == old.url for new in failed)]
        self._specs = (*(spec for spec in specs if spec not in failed), *kept)
        if failed:
            texts = [f"{spec.url}: {error}" for spec, error in failed.items()]
            raise RouterError(f"{self._path}: {'; '.join(texts)}")

    def _wanted(self) -> tuple[EngineSpec, ...]:
        """Return the workers to follow now. Raises RouterError."""
        text = workers_text(self._path)
        self._looks = self._looks + 1 if text == self._text else 0
        self._text = text
        if not self._specs:  # there are no workers to lose
            return read_workers(text, self._path) or ()
        settled = self._looks >= SETTLED_LOOKS
        # A last line without a line end may be incomplete.
        specs = read_workers(text if settled else text[: text.rfind("\n") + 1], self._path)
        if settled and specs is None:
            raise RouterError(
                f"{self._path} has no worker, so the present ones stay; write the line 'none' to "
                "remove them all"
            )
        if settled and specs is not None:
            return specs
        there = {spec.url for spec in self._specs}
        return (*self._specs, *(spec for spec in specs or () if spec.url not in there))

    async def watch(self) -> None:
        """Read the file repeatedly, forever."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            try:
                self.read()
                self._complained = ""
            except RouterError as error:
                if str(error) != self._complained:
                    log.warning("%s", error)
                self._complained = str(error)
