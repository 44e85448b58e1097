# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The offloading manager with vLLM's own types, over a served pool. It asserts its results.

Run it where vLLM is installed: manager_role.py POOL. One rank has left its card, and put the first
four of the request's eight blocks in the pool.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import numpy as np
import vllm
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    TierFilter,
    make_offload_key,
)

from beluga import Namespace
from beluga.connectors.connection import Attachment
from beluga.connectors.vllm.counters import figures, metric_name
from beluga.connectors.vllm.manager import BelugaManager
from beluga.connectors.vllm.rendezvous import Rendezvous
from beluga.connectors.vllm.settings import VllmSettings

HASHES = [bytes([i]) * 32 for i in range(1, 9)]
KEYS = [make_offload_key(one, 0) for one in HASHES]
RANK = Namespace({"rank": 0}, salt="s")
HIT, MISS = LookupResult.HIT, LookupResult.MISS
LONG_S = 60.0


def request(name: str) -> ReqContext:
    context = ReqContext(req_id=name)
    for place, key in enumerate(KEYS):
        context.set_offload_key_position(key, (place + 1) * 16)
    return context


def main() -> None:
    settings = VllmSettings(pool=sys.argv[1], timeout_ms=10000, salt="s")
    other = Attachment(settings)  # the worker's session
    assert Rendezvous("engine", "s").leave(other, 0, RANK)
    other.cache(RANK).put(HASHES[:4], np.ones((4, 4096), dtype=np.uint8))
    manager = BelugaManager(
        settings,
        SimpleNamespace(
            engine_id="engine",
            enable_kv_cache_events=True,
            parallel=SimpleNamespace(world_size=1),
        ),
    )

    def pinned() -> int:
        return other.cache(RANK).stat().pinned_count

    deadline = time.monotonic() + LONG_S
    while not manager.met or not manager.attached:
        assert time.monotonic() < deadline
        time.sleep(0.01)

    first = request("first")
    manager.on_new_request(first)
    assert [manager.lookup(key, first) for key in KEYS[:6]] == [HIT] * 4 + [MISS] * 2
    assert figures()["lookups"] == 1
    assert pinned() > 0
    assert manager.prepare_load(KEYS[:4], first).digests == b"".join(HASHES[:4])
    manager.on_schedule_end(ScheduleEndContext(["first"], ()))
    assert pinned() > 0
    manager.complete_load(set(KEYS[:4]), first)
    assert pinned() == 0
    assert manager.lookup(KEYS[0], first) == MISS  # the load may have failed

    stored = manager.prepare_store(KEYS[4:], first)
    assert (stored.keys_to_store, stored.evicted_keys) == (KEYS[4:], [])
    assert stored.store_spec.digests == b"".join(HASHES[4:])
    other.cache(RANK).put(HASHES[4:6], np.ones((2, 4096), dtype=np.uint8))
    manager.complete_store(set(KEYS[4:]), first)  # two of these were stored
    (event,) = manager.take_events()
    assert (event.keys, event.removed) == (KEYS[4:6], False)
    assert list(manager.take_events()) == []
    manager.on_request_finished(first)
    assert pinned() == 0
    stats = manager.get_stats()
    assert stats is not None and metric_name("lookups", offload=True) in str(stats.data)

    second = request("second")
    second.load_tier_filter = TierFilter(())
    manager.on_new_request(second)
    assert manager.lookup(KEYS[0], second) == MISS  # the request allows no loads
    manager.reset_cache()
    third = request("third")
    manager.on_new_request(third)
    assert manager.lookup(KEYS[0], third) == MISS
    assert manager.prepare_store(KEYS[:1], third).store_spec.digests != HASHES[0]
    manager.shutdown()
    other.close()
    print(f"done with {vllm.__version__[:5]}")


if __name__ == "__main__":
    main()
