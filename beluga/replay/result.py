# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The result of a replay, summed over its clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from beluga.replay.engine import EngineTally
from beluga.replay.trace import TraceRequest, ideal_hit_rate, unique_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Figures of a replay. Rates are 0..1, bytes are of payload, and the RPC is a ping after each
    request.

    ``verify_errors`` counts blocks fetched with wrong bytes. ``mismatches`` counts those that the
    cache found changed and did not return. ``blocks_put_again`` counts puts of blocks that had been
    stored before and were lost: it is 0 if every block that was stored stays a hit.
    ``server_restarts`` counts servers that were killed and started again. ``blocks_got`` came from
    the pool: they are the hits, unless engines have memory of their own (``engines``).
    ``put_gb_per_s`` and ``get_gb_per_s`` are for one client while it puts or gets, with checksums,
    copies and calls to the server.
    """

    requests: int
    blocks_looked_up: int
    blocks_hit: int
    hit_rate: float
    ideal_hit_rate: float
    blocks_got: int
    blocks_put: int
    blocks_refused: int
    bytes_put: int
    bytes_got: int
    blocks_put_again: int
    verify_errors: int
    mismatches: int
    seconds: float
    put_gb_per_s: float
    get_gb_per_s: float
    rpc_p50_us: float
    rpc_p99_us: float
    server_restarts: int = 0
    engines: EngineTally | None = None


def summarize(
    requests: Sequence[TraceRequest],
    block_size: int,
    seconds: float,
    tallies: Sequence[dict[str, Any]],
    server_restarts: int = 0,
) -> Result:
    """Compute the result from the ``Tally`` of every client."""

    def total(name: str) -> Any:
        return sum(tally[name] for tally in tallies)

    rpc_us = np.concatenate([np.array(tally["rpc_ns"], float) for tally in tallies]) / 1000
    p50, p99 = np.percentile(rpc_us, [50, 99]) if len(rpc_us) else (0.0, 0.0)
    bytes_put, bytes_got = total("put_count") * block_size, total("got_count") * block_size
    return Result(
        requests=total("request_count"),
        blocks_looked_up=total("looked_up_count"),
        blocks_hit=total("hit_count"),
        hit_rate=total("hit_count") / max(1, total("looked_up_count")),
        ideal_hit_rate=ideal_hit_rate(requests),
        blocks_got=total("got_count"),
        blocks_put=total("put_count"),
        blocks_refused=total("refused_count"),
        bytes_put=bytes_put,
        bytes_got=bytes_got,
        blocks_put_again=max(total("put_count") - unique_count(requests), 0),
        verify_errors=total("wrong_count"),
        mismatches=total("mismatch_count"),
        seconds=seconds,
        put_gb_per_s=bytes_put / 1e9 / max(total("put_s"), 1e-9),
        get_gb_per_s=bytes_got / 1e9 / max(total("get_s"), 1e-9),
        rpc_p50_us=float(p50),
        rpc_p99_us=float(p99),
        server_restarts=server_restarts,
        engines=_engines([tally["engine"] for tally in tallies if "engine" in tally]),
    )


def _engines(tallies: Sequence[dict[str, Any]]) -> EngineTally | None:
    """Sum the counts of all engines, and list the targets that any of them missed at the end."""
    if not tallies:
        return None
    counts = [field.name for field in fields(EngineTally) if field.name != "missed_targets"]
    missed = tuple(text for tally in tallies for text in tally["missed_targets"])
    return EngineTally(
        **{name: sum(tally[name] for tally in tallies) for name in counts}, missed_targets=missed
    )
