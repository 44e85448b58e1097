# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The connector's counters in one process, since it started and since the last report."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TYPE_CHECKING

from beluga.transfer import TransferClass, TransferStats

if TYPE_CHECKING:
    from beluga.connectors.connection import Connection

NAMES: dict[str, str] = {
    "lookups": "requests looked up in the pool",
    "lookup_s": "seconds the scheduler waited for lookups",
    "hit_tokens": "tokens loaded from the pool on all ranks, beyond the engine's own prefix cache",
    "loads": "requests whose blocks were loaded",
    "loads_beside": "of these, those that no forward waited for",
    "load_blocks": "blocks loaded",
    "load_bytes": "bytes loaded",
    "load_s": "seconds of loading",
    "load_failed_blocks": "blocks that were found but not loaded; their tokens are computed",
    "mismatches": "blocks whose bytes or entry differed from the stored ones at the first read",
    "save_blocks": "blocks saved",
    "save_bytes": "bytes saved",
    "save_states": "of these, states of recurrent layers",
    "save_state_bytes": "bytes of these states",
    "save_states_left": "states not saved: no request is likely to resume there",
    "save_s": "seconds of saving, concurrently with the engine",
    "save_cpu_s": "processor seconds of saving",
    "save_present_blocks": "blocks not saved because the pool already had them",
    "save_skipped_blocks": "blocks not saved: no room, no server, a full queue, or preempted",
    "save_hook_s": "seconds the engine waited in hooks that save",
    "hook_s": "seconds the engine waited in hooks of the connector, loads included",
    "hinted_blocks": "hints given to blocks of requests",
    "hint_refused_blocks": "hints that the tenant's budget refused",
    "hint_skipped_blocks": "hints not given: no server, or too many waiting",
    "hints_ignored": "requests whose hint was malformed",
    "unidentified": "lookups skipped because the model's files were not hashed yet",
    "identity_bytes": "bytes of the model's files that were hashed",
    "lookup_failures": "lookups that failed or had no session with the pool: counted as misses",
    "load_failures": "loads that failed as a whole or had no session with the pool",
    "save_failures": "saves that ended early: a call failed, or no session with the pool",
    "link_onboard_pieces": "pieces of loads that the host's link admitted",
    "link_onboard_bytes": "bytes of loads that the host's link admitted",
    "link_onboard_wait_s": "seconds that pieces of loads waited for the host's link",
    "link_offload_pieces": "pieces of saves that the host's link admitted",
    "link_offload_bytes": "bytes of saves that the host's link admitted",
    "link_offload_wait_s": "seconds that pieces of saves waited for the host's link",
    "link_unthrottled_pieces": "pieces that were copied without tokens of the host's link",
}

PREFIX = "beluga_vllm_"

_process: defaultdict[str, float] = defaultdict(float)
_lock = threading.Lock()


def metric_name(name: str) -> str:
    """Return the name of a counter in Prometheus."""
    return PREFIX + (f"{name[:-2]}_seconds" if name.endswith("_s") else name)


class ConnectorCounters:
    """The counters of one connector, with the names of :data:`NAMES`. Thread-safe."""

    def __init__(self) -> None:
        self._since: defaultdict[str, float] = defaultdict(float)

    def add(self, **amounts: float) -> None:
        """Add to the named counters."""
        with _lock:
            for name, amount in amounts.items():
                self._since[name] += amount
                _process[name] += amount

    def take(self) -> dict[str, float]:
        """Return the counts since the last call."""
        with _lock:
            taken, self._since = self._since, defaultdict(float)
        return dict(taken)


class LinkFigures:
    """Adds the link's counts of pieces to the counters. Thread-safe."""

    def __init__(self, connection: Connection, counters: ConnectorCounters) -> None:
        self._connection, self._counters = connection, counters
        self._before = {kind: TransferStats() for kind in TransferClass}
        self._lock = threading.Lock()

    def add(self) -> None:
        """Add the difference since the last call."""
        with self._lock:
            before, now = self._before, self._connection.transfer_stats()
            self._before = now
        for kind, name in ((TransferClass.ONBOARD, "onboard"), (TransferClass.OFFLOAD, "offload")):
            new, old = now[kind], before[kind]
            if new.pieces == old.pieces and new.unthrottled == old.unthrottled:
                continue
            self._counters.add(
                **{
                    f"link_{name}_pieces": new.pieces - old.pieces,
                    f"link_{name}_bytes": new.bytes - old.bytes,
                    f"link_{name}_wait_s": (new.waited_ns - old.waited_ns) / 1e9,
                    "link_unthrottled_pieces": new.unthrottled - old.unthrottled,
                }
            )


def figures() -> dict[str, float]:
    """Return all counters of this process's connectors since its start, by name."""
    with _lock:
        return {name: _process[name] for name in NAMES}
