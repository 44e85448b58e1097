# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The reasons why servers take over and lose pools (``csrc/rpc/reason.c``)."""

from __future__ import annotations

from dataclasses import dataclass

from beluga._ffi import core, lib
from beluga.metrics import REGISTRY

_TEXTS = {
    lib.BL_REASON_NONE: ("none", "it has not taken the pool over"),
    lib.BL_REASON_FIRST: ("first", "no server had served the pool"),
    lib.BL_REASON_STOPPED: ("stopped", "{server} stopped cleanly"),
    lib.BL_REASON_DECLARED: ("declared", "{server} was declared gone"),
    lib.BL_REASON_GONE: ("gone", "{server} ended without stopping cleanly"),
    lib.BL_REASON_STUCK: (
        "stuck",
        "{server} lives, but its heartbeat stood still for {silent_s:.1f} s",
    ),
    lib.BL_REASON_SILENT: ("silent", "the heartbeat of {server} stood still{silence}"),
}

REASONS = tuple(name for name, _ in _TEXTS.values() if name != "none")
"""The reasons of takeovers, as in labels of metrics."""

DEMOTIONS = ("deposed",)
"""Why a server loses its pool: another server took it over."""

TAKEN = REGISTRY.counter(
    "beluga_takeovers_total",
    "Takeovers by this process, by reason: first (the pool had no server before), stopped "
    "(the previous server stopped cleanly), declared (an operator declared it gone), gone (it "
    "ended otherwise), stuck (its process lives, but its heartbeat has stopped), silent (the "
    "heartbeat of another host has stopped).",
)
LOST = REGISTRY.counter(
    "beluga_demotions_total",
    "Pools that this process lost, by reason: deposed (another server took over).",
)
for _reason in REASONS:
    TAKEN.add(0, reason=_reason)
for _reason in DEMOTIONS:
    LOST.add(0, reason=_reason)


@dataclass(frozen=True, slots=True)
class TakeoverCause:
    """The previous server, and why it was replaced.

    ``reason`` is one of :data:`REASONS`, or "none" before the takeover. ``epoch`` and ``host``
    identify the previous server; ``epoch`` is 0 if there was none. ``silent_s`` is how many seconds
    its heartbeat did not advance, as observed by a standby.
    """

    epoch: int
    host: int
    reason: str
    silent_s: float

    def __str__(self) -> str:
        text = next(text for name, text in _TEXTS.values() if name == self.reason)
        return text.format(
            server=f"the server of epoch {self.epoch} on host {self.host}",
            silent_s=self.silent_s,
            silence=f" for {self.silent_s:.1f} s" if self.silent_s else "",
        )


def takeover_cause(found: core.bl_takeover_cause) -> TakeoverCause:
    """Convert the record in C. An unknown reason, of a damaged trace, becomes "none"."""
    name = _TEXTS.get(found.reason, _TEXTS[lib.BL_REASON_NONE])[0]
    return TakeoverCause(int(found.epoch), int(found.host), name, found.silent_ns / 1e9)
