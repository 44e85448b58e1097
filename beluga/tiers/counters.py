# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Serves the counters of the lower tiers to any process of the pool.

They are kept in the metrics registry of the server's process. A thread there formats them twice a
second, and the server replies with the latest text. So the poll loop never calls a tier.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

from beluga.errors import BelugaError
from beluga.index import COUNTERS_METHOD
from beluga.metrics import REGISTRY, Distribution
from beluga.threads import Thread

if TYPE_CHECKING:
    from beluga.index import IndexServer

_INTERVAL_S = 0.5
_BREAKER = ("closed", "half-open", "open")
_PREFIXES = ("beluga_tier_", "beluga_onboard_", "beluga_offload_")


class CountersService:
    """Serves the counters of a service's tiers, from :meth:`start` to :meth:`stop`."""

    def __init__(self, server: IndexServer) -> None:
        self._server = server
        self._text = self._make()
        self._ending = threading.Event()
        self._thread = Thread(target=self._run, name="beluga-counters", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._server.handle(COUNTERS_METHOD, lambda _: self._text)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(_INTERVAL_S):
            try:
                self._text = self._make()
            except BelugaError:
                return  # the server has stopped

    def _make(self) -> bytes:
        counters = gather()
        counters["work"] = self._server.lower_stat().as_dict()
        return json.dumps(counters).encode()


def gather() -> dict[str, Any]:
    """Return this process's counters: those of each tier, by name, and the totals.

    A series with further labels, such as the kind of a failure, becomes a dictionary.
    """
    everything: dict[str, Any] = {}
    tiers: dict[str, dict[str, Any]] = {}
    for name, sample in REGISTRY.snapshot().items():
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
        if prefix is None:
            continue
        short = name.removeprefix("beluga_tier_").removeprefix("beluga_").removesuffix("_total")
        for labels, value in sample.series.items():
            others = dict(labels)
            owner = others.pop("tier", None)
            target = everything if owner is None else tiers.setdefault(owner, {})
            if others:
                target = target.setdefault(short, {})
            target[" ".join(others[key] for key in sorted(others)) or short] = _plain(value)
    for tier in tiers.values():
        _derive(tier)
    return {"tiers": tiers, **everything}


def _plain(value: float | Distribution) -> Any:
    if isinstance(value, Distribution):
        return {"count": value.count, "seconds": round(value.total, 6)}
    return int(value) if float(value).is_integer() else value


def _derive(tier: dict[str, Any]) -> None:
    """Add derived values: the breaker's state as text, and the bytes written to the medium per byte
    that was hit later (None while there was no hit).
    """
    if (state := tier.get("breaker_state")) is not None:
        tier["breaker_state"] = _BREAKER[state]
    loaded = tier.get("loaded_bytes", 0)
    written = tier.get("written_bytes", tier.get("saved_bytes", 0))
    tier["written_per_hit_byte"] = round(written / loaded, 3) if loaded else None
