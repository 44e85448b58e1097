# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A file of workers that is read repeatedly: workers that are added to it join, and those that are
removed drain. A worker whose new settings do not work keeps its former ones.

Nobody has to write the file in one step. A look may see it cut, because another program truncates
it and writes it anew. So a new whole line counts at once, but what is missing or changed counts
only when the file has been the same for ``SETTLED_LOOKS`` looks. A file that cannot be read, is not
valid, or has no line changes nothing: the line ``none`` removes all workers.
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
"""After so many further looks that saw the same text, no writer is expected to be at work."""


class WorkersFile:
    """Follows a file. It drains only workers that the file itself has named."""

    def __init__(self, path: Path, fleet: Fleet) -> None:
        self._path = path
        self._fleet = fleet
        self._specs: tuple[EngineSpec, ...] = ()
        self._text = ""
        self._looks = 0  # how many looks in a row have seen this text again
        self._complained = ""

    def read(self) -> None:
        """Look at the file and apply its content. Raises RouterError."""
        specs = self._wanted()
        failed = self._fleet.follow(specs, self._specs)
        kept = [old for old in self._specs if any(new.url == old.url for new in failed)]
        self._specs = (*(spec for spec in specs if spec not in failed), *kept)
        if failed:
            texts = [f"{spec.url}: {error}" for spec, error in failed.items()]
            raise RouterError(f"{self._path}: {'; '.join(texts)}")

    def _wanted(self) -> tuple[EngineSpec, ...]:
        """Return the workers that are to be followed now. Raises RouterError."""
        text = workers_text(self._path)
        self._looks = self._looks + 1 if text == self._text else 0
        self._text = text
        if not self._specs:  # nobody can be lost
            return read_workers(text, self._path) or ()
        settled = self._looks >= SETTLED_LOOKS
        # A last line without its end may be the beginning of another one.
        specs = read_workers(text if settled else text[: text.rfind("\n") + 1], self._path)
        if settled and specs is None:
            raise RouterError(
                f"{self._path} names no worker, so the former ones stay; "
                "write the line 'none' to remove them all"
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
