# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Which engine made which response of ``/v1/responses``: only that engine can show it, cancel it,
or continue it.

An answer's first piece names the response, whether it is whole or a stream of events: engines send
the object with its ``id`` first. The router remembers the last ones; of others any engine is asked,
which says in its own words that there is no such response.
"""

from __future__ import annotations

import re
from collections import OrderedDict

MOST = 100_000
"""How many responses are remembered."""

PATH = "/v1/responses"
_OF_ONE = re.compile(r"/v1/responses/([^/]+)(?:/.*)?")
_ID = re.compile(rb'"id"\s*:\s*"(resp_[\w.:-]{1,200})"')


def response_of(path: str) -> str | None:
    """Return the response that a path is about: that of ``/v1/responses/ID`` or ``ID/cancel``."""
    found = _OF_ONE.fullmatch(path)
    return found[1] if found else None


class Responses:
    """The workers that made the last responses."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._workers: OrderedDict[str, int] = OrderedDict()

    def made(self, piece: bytes, worker: int) -> None:
        """Note the response that begins with this piece of an answer."""
        if (found := _ID.search(piece)) is None:
            return
        name = found[1].decode()
        self._workers[name] = worker
        self._workers.move_to_end(name)
        while len(self._workers) > self._most:
            self._workers.popitem(last=False)

    def worker_of(self, name: str | None) -> int | None:
        """Return the worker that made a response, or None if that is not known."""
        return None if name is None else self._workers.get(name)
