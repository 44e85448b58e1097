# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A file of workers that is read repeatedly: workers that are added to it join, and those that are
removed drain. A file that cannot be read changes nothing. A worker whose new settings do not work
keeps its former ones.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from beluga.errors import RouterError
from beluga.gateway.fleet import Fleet
from beluga.gateway.settings import EngineSpec, read_workers_file

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0


class WorkersFile:
    """Follows a file. It drains only workers that the file itself has named."""

    def __init__(self, path: Path, fleet: Fleet) -> None:
        self._path = path
        self._fleet = fleet
        self._specs: tuple[EngineSpec, ...] = ()
        self._complained = ""

    def read(self) -> None:
        """Apply the file's content. Raises RouterError."""
        specs = read_workers_file(self._path)
        failed = self._fleet.follow(specs, self._specs)
        kept = [old for old in self._specs if any(new.url == old.url for new in failed)]
        self._specs = (*(spec for spec in specs if spec not in failed), *kept)
        if failed:
            texts = [f"{spec.url}: {error}" for spec, error in failed.items()]
            raise RouterError(f"{self._path}: {'; '.join(texts)}")

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
