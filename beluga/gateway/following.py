# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Follows one engine's KV events over its endpoints, one per data-parallel rank, and detects why
the index cannot follow them.
"""

from __future__ import annotations

from collections.abc import Sequence

from beluga.gateway.engine import Engine
from beluga.gateway.listener import Listener
from beluga.router import HashBlocks

UNREAD_S = 60.0  # how long a problem remains after the last unusable event
_LATE = (
    "the engine had blocks before this router started, or messages were missed. {} "
    "A cache that the engine clears (vLLM: POST /reset_prefix_cache) is followed again"
)
_REPLAY = "Name its replay endpoint (--kv-events URL=ENDPOINT,REPLAY)."
_SHORT = "Its replay (vLLM: buffer_steps) does not reach back so far."


class Following:
    """The listeners of one engine."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self.listeners = listeners
        self._computing_since: float | None = None  # since when a silent engine has had prompts
        self._event_counts: dict[str, int] = {}  # number of events by kind
        self._until: dict[str, float] = {}  # end of the problem, by kind of event

    @property
    def lost(self) -> int:
        """The number of messages that were missed and not replayed."""
        return sum(listener.lost for listener in self.listeners)

    @property
    def unread(self) -> int:
        """The number of malformed messages, and of malformed events in messages."""
        return sum(listener.unread for listener in self.listeners)

    def resize(self, block_size: int, hash_blocks: HashBlocks) -> None:
        """Set the router's new block size."""
        for listener in self.listeners:
            listener.resize(block_size, hash_blocks)

    def close(self) -> None:
        """Close the listeners."""
        for listener in self.listeners:
            listener.close()

    def problem(self, engine: Engine, block_size: int, *, now: float, silent_s: float) -> str:
        """Return why the index cannot follow the engine's events, or "". An engine that computes
        publishes blocks within ``silent_s``.
        """
        return (
            self._unusable(now)
            or self._alone(now, silent_s)
            or self._silence(engine, block_size, now, silent_s)
            or self._ranks(engine)
        )

    def _unusable(self, now: float) -> str:
        """Return the unusable events of the last :data:`UNREAD_S` seconds."""
        misfits = sum(listener.misfits for listener in self.listeners)
        if self._recent("unread", self.unread, now):
            error = max(self.listeners, key=lambda listener: listener.unread).error
            return f"{self.unread} KV events are malformed; the last: {error}"
        why = _LATE.format(
            _SHORT if all(listener.has_replay for listener in self.listeners) else _REPLAY
        )
        if self._recent("misfit", misfits, now):
            error = max(self.listeners, key=lambda listener: listener.misfits).misfit
            more = ""
            if "parent block not found" in error:
                more = f": {why}"
            elif "exceeds the limit" in error:
                more = " (--index-ranks)"
            return f"{misfits} KV events could not be applied; the last: {error}{more}"
        if self._recent("lost", self.lost, now):
            return f"{self.lost} messages of KV events were missed: {why}"
        return ""

    def _recent(self, kind: str, count: int, now: float) -> bool:
        """Return whether a count has increased in the last :data:`UNREAD_S` seconds."""
        if count != self._event_counts.get(kind, 0):
            self._event_counts[kind] = count
            self._until[kind] = now + UNREAD_S
        return now < self._until.get(kind, now)

    def _alone(self, now: float, silent_s: float) -> str:
        for listener in self.listeners:
            if listener.alone_since is not None and now - listener.alone_since >= silent_s:
                return (
                    f"no process publishes KV events at {listener.endpoint}; the engine must "
                    "bind there (--kv-events-config)"
                )
        return ""

    def _silence(self, engine: Engine, block_size: int, now: float, silent_s: float) -> str:
        if any(listener.alone_since is not None for listener in self.listeners):
            return ""
        received = any(listener.received for listener in self.listeners)
        if received or engine.prompt_tokens < block_size:
            self._computing_since = None
            return ""
        if self._computing_since is None:
            self._computing_since = now
        if now - self._computing_since > silent_s:
            return "it has computed prompts but published no KV event"
        return ""

    def _ranks(self, engine: Engine) -> str:
        """Return whether an engine has data-parallel ranks without received events."""
        named = len(self.listeners)
        announced = sum(listener.ranks for listener in self.listeners)
        if engine.ranks <= max(named, announced):
            return ""
        return (
            f"it has {engine.ranks} data-parallel ranks, but KV events of {named} are configured; "
            "repeat --kv-events for each (vLLM adds the rank to the port)"
        )
