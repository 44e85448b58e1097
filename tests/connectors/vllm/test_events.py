# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""KV events of a real engine: each saved block is announced once, in vLLM's own schema."""

from __future__ import annotations

import json
import subprocess
from collections import Counter

import pytest
from beluga_bench.vllm.prompts import prompt

from tests.connectors.vllm.conftest import TOKENS, Site, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK = 128

# This program prints medium, tokens, size and kind of every announced block.
SUBSCRIBER = """
import json, sys, msgspec, zmq
from vllm.distributed.kv_events import BlockStored, KVEventBatch
socket = zmq.Context().socket(zmq.SUB)
socket.connect(sys.argv[1])
socket.subscribe(b"")
print("ready", flush=True)
decoder = msgspec.msgpack.Decoder(KVEventBatch)
while True:
    _, _, payload = socket.recv_multipart()
    for event in decoder.decode(payload).events:
        if isinstance(event, BlockStored):
            kind = event.kv_cache_spec_kind
            print(json.dumps([event.medium, event.token_ids, event.block_size, kind]), flush=True)
"""


def test_saved_blocks_are_announced_once(site: Site) -> None:
    endpoint = f"ipc://{site.folder}/events"
    command = [site.python, "-c", SUBSCRIBER, endpoint]
    with (site.folder / "events.log").open("w") as log:
        subscriber = subprocess.Popen(command, stdout=log, stderr=subprocess.DEVNULL)
    engine = site.engine(
        "announcer",
        connector={},
        kv_events_config={
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint,
        },
    )
    received = site.folder / "events.log"

    def shared() -> Counter[tuple[int, ...]]:
        lines = [json.loads(line) for line in received.read_text().splitlines()[1:]]
        assert all(line[2:] == [BLOCK, "full_attention"] for line in lines)
        return Counter(tuple(tokens) for medium, tokens, *_ in lines if medium == "SHARED")

    try:
        engine.ready()
        wait_until(lambda: received.read_text().startswith("ready"), 120, "the subscriber")
        tokens = prompt(TOKENS, seed=1)
        blocks = {tuple(tokens[i : i + BLOCK]) for i in range(0, TOKENS - 1, BLOCK)}
        engine.generate(tokens)

        def announced() -> bool:
            engine.call("idle")  # a worker reports its saves with the next step
            engine.generate(tokens[:5])
            return set(shared()) == blocks

        wait_until(announced, 60, f"{len(blocks)} blocks; received: {received.read_text()[:500]}")
        assert set(shared().values()) == {1}
        engine.generate(tokens)  # the blocks are offered again but are not new
        engine.generate(tokens[:5])
        assert set(shared().values()) == {1}
    finally:
        subscriber.kill()
        subscriber.wait()
        engine.kill()
