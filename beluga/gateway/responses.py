# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Which engine made which response of ``/v1/responses``: only that engine can show, cancel or
continue it.

The first piece of a response contains its ``id``, in a whole response and in an event stream. The
router remembers the last ones; requests for others are sent to any engine, which reports that there
is no such response.
"""

from __future__ import annotations

import re
from collections import OrderedDict

MOST = 100_000
"""The number of remembered responses."""

PATH = "/v1/responses"
_OF_ONE = re.compile(r"/v1/responses/([^/]+)(?:/.*)?")
_ID = re.compile(rb'"id"\s*:\s*"(resp_[\w.:-]{1,200})"')


def response_of(path: str) -> str | None:
    """Return the response that a path refers to: ``/v1/responses/ID`` or ``ID/cancel``."""
    found = _OF_ONE.fullmatch(path)
    return found[1] if found else None


class Responses:
    """The workers that made the last responses."""

    def __init__(self, limit: int = MOST) -> None:
        self._limit = limit
        self._workers: OrderedDict[str, int] = OrderedDict()

    def made(self, piece: bytes, worker: int) -> None:
        """Record the response that starts with this piece."""
        if (found := _ID.search(piece)) is None:
            return
        name = found[1].decode()
        self._workers[name] = worker
        self._workers.move_to_end(name)
        while len(self._workers) > self._limit:
            self._workers.popitem(last=False)

    def worker_of(self, name: str | None) -> int | None:
        """Return the worker that made a response, or None if unknown."""
        return None if name is None else self._workers.get(name)
