# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The hints of vLLM's requests, and the sessions that link a request to its earlier blocks.

A hint is in ``kv_transfer_params``, which clients write, or in ``kv_hints``, which a program that
calls the engine writes, as the payload of an action of the type ``beluga.hint``. Dynamo's router
adds an action ``kv.fetch`` 1.0, which names blocks of the request that another worker has (in
``kv_hints``, or as ``kv_hint`` of ``kv_transfer_params``): it requests a prefetch, because the pool
is every worker's source. Without a hint the request's own priority counts: vLLM serves the lower
number first, so blocks of requests below 0 are favored, and those of requests above 0 are evicted
first.

The blocks that a session's first request did not find are the session's own, and so is all that
follows them. Later requests with the same ``session_id`` give their hints to these blocks, too, as
far as they begin with the same tokens.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from beluga.connectors.hints import NAME, NO_HINT, HintReader, RequestHint

if TYPE_CHECKING:
    import logging

    from beluga.connectors.vllm.counters import ConnectorCounters

ACTION = "beluga.hint"
"""The type of an action of ``kv_hints`` with a hint."""

FETCH = ("kv.fetch", "1.0")
"""The type and version of an action that requests a prefetch."""

SESSIONS_MAX = 1 << 14  # remembered sessions; the least recently used is forgotten
_SESSION_LENGTH_MAX = 256  # characters of a session's name


class Requests:
    """Reads the hints of requests and remembers their sessions. Only the scheduler's thread uses
    it.
    """

    def __init__(self, counters: ConnectorCounters, logger: logging.Logger) -> None:
        self._counters, self._reader = counters, HintReader(logger)
        self._own: OrderedDict[str, tuple[int, bytes]] = OrderedDict()  # the first block, its hash

    def hint(self, request: Any) -> RequestHint:
        """Return what a request's hint holds for its blocks. A malformed one is ignored."""
        actions = list(_actions(request))
        given = _given(request, actions)
        hint: RequestHint | None = _by_priority(getattr(request, "priority", 0))
        if given is not None:
            hint = self._reader.read(given)
        if hint is None:
            self._counters.add(hints_ignored=1)
            hint = NO_HINT
        if any(action[:2] == FETCH for action in actions):
            hint = dataclasses.replace(hint, prefetch=True)
        return hint

    def begun(self, request: Any) -> bool:
        """Return whether a request continues a session."""
        return _session(request) in self._own

    def own_from(self, request: Any, hits: int) -> int:
        """Return the first block that is a request's own, or its session's, if ``found`` leading
        blocks were hits when it started.
        """
        session, hashes = _session(request), request.block_hashes
        if not session:
            return hits
        first, block = self._own.pop(session, (hits, b""))
        if first >= len(hashes) or bytes(hashes[first]) != block:
            first = hits
        if first < len(hashes):
            self._own[session] = first, bytes(hashes[first])
        if len(self._own) > SESSIONS_MAX:
            self._own.popitem(last=False)
        return min(first, hits)


def _actions(request: Any) -> Iterator[tuple[object, object, object]]:
    """Yield type, version and payload of each action for a request."""
    envelope = getattr(request, "kv_hints", None)
    for action in envelope.actions if envelope is not None else ():
        yield action.action_type, action.action_version, action.payload
    message = _parameters(request).get("kv_hint")
    actions = message.get("actions") if isinstance(message, Mapping) else None
    for entry in actions if isinstance(actions, list) else ():
        if isinstance(entry, Mapping):
            yield entry.get("action_type"), entry.get("action_version"), entry.get("payload")


def _given(request: Any, actions: list[tuple[object, object, object]]) -> object:
    """Return what a request has for a hint, or None."""
    for kind, _, payload in reversed(actions):
        if kind == ACTION:
            return payload
    return _parameters(request).get(NAME)


def _parameters(request: Any) -> Mapping[str, Any]:
    parameters = getattr(request, "kv_transfer_params", None)
    return parameters if isinstance(parameters, Mapping) else {}


def _by_priority(priority: object) -> RequestHint:
    if not isinstance(priority, int) or priority == 0:
        return NO_HINT
    return RequestHint(priority="high" if priority < 0 else "low")


def _session(request: Any) -> str:
    """Return the name of a request's session, or an empty one."""
    name = getattr(request, "session_id", None)
    return name if isinstance(name, str) and len(name) <= _SESSION_LENGTH_MAX else ""
