# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A file of workers that is looked at again and again: what is added to it joins, what is taken out
drains. A file that cannot be read changes nothing."""

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
    """Follows a file; only workers that it has named itself are drained."""

    def __init__(self, path: Path, fleet: Fleet) -> None:
        self._path = path
        self._fleet = fleet
        self._specs: tuple[EngineSpec, ...] = ()
        self._complained = ""

    def read(self) -> None:
        """Take over what it says now. Raises RouterError."""
        specs = read_workers_file(self._path)
        self._fleet.follow(specs, self._specs)
        self._specs = specs

    async def watch(self) -> None:
        """Do so for ever."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            try:
                self.read()
                self._complained = ""
            except RouterError as error:
                if str(error) != self._complained:
                    log.warning("%s", error)
                self._complained = str(error)
