# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The hooks of real engines, in the order in which vLLM has called them (``recording.py``),
replayed against a fake engine's memory.

The memory has a value for each token's KV, which is right only if the KV of all tokens before it
was right when a step computed it, and the token was not a draft that was rejected later.

``BELUGA_RENEW_RECORDED=1 pytest -m slow tests/connectors/vllm/test_recorded.py`` renews the files
in ``recorded``.
"""

from __future__ import annotations

import importlib
import itertools
import json
import lzma
import os
import subprocess
from collections import Counter, defaultdict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import numpy as np
import pytest
from beluga_bench.vllm.model import SIZES
from beluga_bench.vllm.process import environment_of, options_of
from fake_vllm import cache_config, config, layer_major, spec
from real_engines import FOLDER, Site, child_of, several
from scene import LONG_S, allocated, meet, set_connector
from support.blocks import eventually
from support.emulation import long

from beluga import IndexServer
from beluga.connectors.vllm import load_timing

WORDS = 4  # of 16 bits, for each token
WRONG = 0xBAD


def calls(path: Path) -> list[Any]:
    """Return the lines of a recording. Omitted fields are empty lists."""
    content = path.read_bytes()
    text = lzma.decompress(content) if path.suffix == ".xz" else content
    lines = map(json.loads, text.splitlines())
    return [defaultdict(list, {"hook": line} if isinstance(line, str) else line) for line in lines]


class Replay:
    """One recording, replayed on a pool."""

    def __init__(self, path: Path, pool_name: str, **settings: Any) -> None:
        head, *self._lines = calls(path)
        self._size: int = head["block_tokens"]
        module = importlib.import_module("beluga.connectors.vllm.connector")
        engine = set_connector(config(block_size=self._size), pool_name, **settings)
        tensors, self._memory = layer_major(1, head["blocks"], self._size, WORDS)
        page = self._memory[0, 0].nbytes
        caches = cache_config(spec(page_size_bytes=page), num_blocks=head["blocks"], layers=1)
        caches.hash_block_size = self._size
        role = fake_vllm.Role
        self.scheduler: Any = module.BelugaConnector(engine, role.SCHEDULER, caches)
        self.worker: Any = module.BelugaConnector(engine, role.WORKER, caches)
        self._requests: dict[str, Any] = {}
        self.scheduler._kv_cache_manager = SimpleNamespace(
            get_block_ids=lambda name: (self._requests[name].table,)
        )
        meet(self.scheduler, self.worker, tensors)
        self._hash_of = self._watch(self.scheduler._lookups)
        self._steps: deque[Any] = deque()
        self._step: Any = None
        self._reports: deque[Any] = deque()
        self._drafts: list[tuple[Any, int, int]] = []
        self._held: list[str] = []
        self._sent: list[str] = []
        self._loaded: Counter[str] = Counter()
        self._final = self._last_hashes()
        self.hooks: Counter[str] = Counter()

    def run(self) -> None:
        """Make all calls. Raises AssertionError if the connector returns other values."""
        for line in self._lines:
            for name, changes in dict(line["requests"]).items():
                self._change(name, changes)
            self.hooks[line["hook"]] += 1
            getattr(self, f"_{line['hook']}")(line)
        assert sorted(self._sent) == sorted(self._held), "each request is let go once"

    def check(self) -> int:
        """Check that each block in the pool is right. Returns how many there are."""
        worker = self.worker._worker
        attachment = worker.connection._attachment
        cache, checked = attachment.cache(self.scheduler._lookups.ranks[0]), 0
        for digest, name in self._hash_of.items():
            content = np.zeros((1, self._size, WORDS), dtype=np.uint16)
            if cache.get([digest], content.view(np.uint8).reshape(1, -1)).hits:
                checked += 1
                assert (content[0] == self._right(name)).all(), name.hex()
        return checked

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()

    # ---- the hooks, by their names in a recording

    def _matched(self, line: Any) -> None:
        matched = self.scheduler.get_num_new_matched_tokens(self._of(line), line["tokens"])
        assert list(matched) == line["found"], line

    def _allocated(self, line: Any) -> None:
        blocks = allocated(line["blocks"])
        self.scheduler.update_state_after_alloc(self._of(line), blocks, line["tokens"])

    def _schedule(self, line: Any) -> None:
        scheduled = dict(line["scheduled"])
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled, preempted_req_ids=set(line["preempted"])
        )
        computing = [
            (self._requests[name], self._requests[name].num_computed_tokens, tokens)
            for name, tokens in scheduled.items()
        ]
        tables = [list(request.table) for request, _, _ in computing]
        self._steps.append((self.scheduler.build_connector_meta(output), computing, tables))

    def _preempt(self, line: Any) -> None:
        self._step = self._steps.popleft()
        self.worker.handle_preemptions(self._step[0])

    def _bind(self, line: Any) -> None:
        self.worker.bind_connector_metadata(self._step[0])
        self._idle()  # a save reads the engine's present memory

    def _load(self, line: Any) -> None:
        self.worker.start_load_kv(None)

    def _other(self, line: Any) -> None:
        for block, name, right in line["blocks"]:
            self._memory[0, block] = self._right(_long(name)) if right else WRONG

    def _save(self, line: Any) -> None:
        _, computing, tables = self._step
        for (request, first, tokens), table in zip(computing, tables, strict=True):
            known = min(first + tokens, request.num_tokens)
            self._compute(request, table, first, known)
            for position in range(known, first + tokens):
                self._memory[0, table[position // self._size], position % self._size] = WRONG
            if known < first + tokens:
                self._drafts.append((request, known, first + tokens))
        self.worker.wait_for_save()

    def _ended(self, line: Any) -> None:
        def ended() -> bool:
            sent, loaded = self.worker.get_finished(set(line["requests_ended"]))
            self._sent += sent or ()
            self._loaded.update(loaded or ())
            return set(line["sent"]) <= set(self._sent) and set(line["loaded"]) <= set(self._loaded)

        assert eventually(ended, LONG_S), line

    def _errors(self, line: Any) -> None:
        assert sorted(self.worker.get_block_ids_with_load_errors()) == line["found"]

    def _report(self, line: Any) -> None:
        self._reports.append(self.worker.build_connector_worker_meta())

    def _output(self, line: Any) -> None:
        for request, first, last in self._drafts:  # those that were accepted
            settled = min(last, request.num_computed_tokens - request.num_in_flight_tokens)
            self._compute(request, request.table, first, settled)
        self._drafts = []
        self.scheduler.update_connector_output(
            SimpleNamespace(
                kv_connector_worker_meta=self._reports.popleft(),
                invalid_block_ids=set(line["invalid"]),
            )
        )

    def _finished(self, line: Any) -> None:
        held, _ = self.scheduler.request_finished(self._of(line), line["blocks"])
        assert held == line["held"], line
        if held:
            self._held.append(line["request"])

    def _reset(self, line: Any) -> None:
        self.scheduler.reset_cache()

    def _end(self, line: Any) -> None:
        self._idle()
        assert self.worker.get_kv_connector_stats().data["save_blocks"] >= line["saved"]

    # ---- the engine

    def _of(self, line: Any) -> Any:
        return self._requests[line["request"]]

    def _change(self, name: str, changes: Any) -> None:
        if name not in self._requests:
            self._requests[name] = SimpleNamespace(
                request_id=name, table=[], block_hashes=[], lora_request=None, cache_salt=None
            )
            self._requests[name].mm_features = []
        request = self._requests[name]
        for part, field in (
            ("computed", "num_computed_tokens"),
            ("in_flight", "num_in_flight_tokens"),
            ("nans", "num_nans_in_logits"),
            ("tokens", "num_tokens"),
        ):
            setattr(request, field, changes.get(part, getattr(request, field, 0)))
        request.all_token_ids = [0] * request.num_tokens
        request.table = _changed(request.table, changes.get("table"))
        if "hashes" in changes:
            new = changes["hashes"]
            names = _changed([None] * len(request.block_hashes), new)
            request.block_hashes = [
                _long(digest) if digest else request.block_hashes[index]
                for index, digest in enumerate(names)
            ]

    def _compute(self, request: Any, table: list[int], first: int, last: int) -> None:
        """Compute tokens [first, last) from the KV of earlier ones."""
        right = all(
            (self._token(table, at) == self._wanted(request, at)).all() for at in range(first)
        )
        for at in range(first, last):
            self._token(table, at)[:] = self._wanted(request, at) if right else WRONG

    def _token(self, table: list[int], at: int) -> Any:
        return self._memory[0, table[at // self._size], at % self._size]

    def _wanted(self, request: Any, at: int) -> Any:
        hashes = self._final[request.request_id]
        block = at // self._size
        if block >= len(hashes):  # the last block is never full
            return np.full(WORDS, 1, dtype=np.uint16)
        return self._right(hashes[block])[at % self._size]

    def _right(self, name: bytes) -> Any:
        words = np.frombuffer(name[: 2 * WORDS], dtype=np.uint16)
        return words + np.arange(self._size, dtype=np.uint16)[:, None]

    def _last_hashes(self) -> dict[str, list[bytes]]:
        hashes_by_request: dict[str, list[Any]] = {}
        for line in self._lines:
            for name, changes in dict(line["requests"]).items():
                hashes_by_request[name] = _changed(
                    hashes_by_request.get(name, []), changes.get("hashes")
                )
        return {name: list(map(_long, hashes)) for name, hashes in hashes_by_request.items()}

    def _idle(self) -> None:
        saves = self.worker._worker.saves
        assert eventually(lambda: not saves._running, LONG_S)

    def _watch(self, lookups: Any) -> dict[bytes, bytes]:
        """Make a scheduler record its digests with vLLM's hashes from now on, and return the
        record.
        """
        named, hashes_by_digest = lookups.named, dict[bytes, bytes]()

        def watched(hashes: Any, *given: Any, **named_: Any) -> Any:
            digests = named(hashes, *given, **named_)
            hashes_by_digest.update(zip(digests, hashes, strict=True))
            return digests

        lookups.named = watched
        return hashes_by_digest


def _changed(before: list[Any], change: Any) -> list[Any]:
    """Return a list after a change in the form of a recording."""
    if change is None:
        return before
    if isinstance(change, dict):
        return before[: change["after"]] + change["new"]
    return list(change)


def _long(name: str) -> bytes:
    """Return a hash of the usual length from the eight bytes that were recorded."""
    return bytes.fromhex(name) * 4


RECORDED = FOLDER / "recorded"
SUFFIX = ".jsonl.xz"
KINDS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"load": "async"},
    "drafts": {},
    "multi-other": {},
    "multi-ours": {},
    "multi-async": {"load": "async"},
}


def options(kind: str, folder: Path, model: Path, pool: str) -> dict[str, Any]:
    """Return options of an engine whose memory and steps are too small for its requests."""
    # The kinds share a pool. An engine must not find the blocks of another kind.
    settings = {"pool": pool, "salt": kind, "timeout_ms": 5000, "retry_s": 0.2} | KINDS[kind]
    module = {"kv_connector_module_path": "recording"}
    ours = child_of("RecordingConnector", **settings) | module
    other = child_of("RecordedFaults") | module
    connector = ours
    if kind.startswith("multi"):
        connector = several(*([ours, other] if kind == "multi-ours" else [other, ours]))
    given = options_of(
        model, SIZES["tiny"], tokens=448, connector=connector, dtype="float32", block_tokens=32
    )
    # a block is 2 * 4 layers * 4 heads * 32 * 4 bytes * 32 tokens
    size = SIZES["tiny"].token_bytes(4) * 32
    small = {"max_num_batched_tokens": 128, "max_num_seqs": 4, "kv_cache_memory_bytes": 20 * size}
    if kind == "drafts":
        small["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    return given | small


def replayed(kind: str, pool_name: str, **settings: Any) -> Counter[str]:
    replay = Replay(RECORDED / f"{kind}{SUFFIX}", pool_name, **KINDS[kind] | settings)
    try:
        replay.run()
        assert replay.check() > 0
    finally:
        replay.close()
    return replay.hooks


@pytest.mark.parametrize(
    "kind",
    [
        long(kind) if kind in ("async", "multi-other") else kind
        for kind in sorted(path.name.removesuffix(SUFFIX) for path in RECORDED.iterdir())
    ],
)
def test_recorded_calls_of_real_engines_store_only_correct_blocks(
    server: IndexServer, pool_name: str, vllm: list[str], kind: str
) -> None:
    hooks = replayed(kind, pool_name)
    assert hooks["reset"] == 1
    assert ("other" in hooks) is kind.startswith("multi")


def test_concurrent_loads_of_auto_equal_those_of_async(
    server: IndexServer, pool_name: str, vllm: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every load is too long here, so vLLM must make the same calls."""
    monkeypatch.setattr(load_timing, "LIMIT_S", 0.0)
    monkeypatch.setattr(load_timing, "IDLE_LIMIT_S", 0.0)
    assert replayed("async", pool_name, load="auto")["matched"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_a_real_engine_makes_the_recorded_calls(
    site: Site, tmp_path: Path, tiny_model: Path, kind: str
) -> None:
    """The hooks and the pairs of consecutive ones are the same; their number depends on timing."""
    made = tmp_path / f"{kind}.jsonl"
    given = options(kind, tmp_path, tiny_model, ":".join(map(str, site.paths)))
    environment = environment_of(tmp_path) | {
        "PYTHONPATH": str(FOLDER),
        "BELUGA_TEST_FAULTS": str(tmp_path / "faults"),
    }
    command = [site.python, str(FOLDER / "recording.py"), kind, json.dumps(given), str(made)]
    ran = subprocess.run(
        command, env=environment, check=False, capture_output=True, text=True, timeout=800
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    if os.environ.get("BELUGA_RENEW_RECORDED"):
        RECORDED.mkdir(exist_ok=True)
        (RECORDED / f"{kind}{SUFFIX}").write_bytes(lzma.compress(made.read_bytes(), preset=9))
    if not (RECORDED / f"{kind}{SUFFIX}").exists():
        pytest.skip(f"nothing to compare with: recorded/{kind}{SUFFIX} is not made yet")
    assert pairs(made) == pairs(RECORDED / f"{kind}{SUFFIX}")


def pairs(path: Path) -> set[tuple[str, str]]:
    """Return the pairs of consecutive hooks."""
    hooks = [call["hook"] for call in calls(path)[1:]]
    return set(itertools.pairwise(hooks))
