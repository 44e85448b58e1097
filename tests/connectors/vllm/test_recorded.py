# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The hooks of real engines, in the order in which vLLM has called them.

``BELUGA_RENEW_RECORDED=1 pytest -m slow tests/connectors/vllm/test_recorded.py`` renews the files
in ``recorded``.
"""

from __future__ import annotations

import itertools
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_vllm
import pytest
from beluga_bench.vllm.model import SIZES
from beluga_bench.vllm.process import environment_of, options_of
from replaying import Replay, calls
from support.emulation import long

from beluga import IndexServer, Pool
from beluga.connectors.vllm import load_timing
from tests.connectors.vllm.conftest import Site

FOLDER = Path(__file__).parent
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
    both = {"kv_role": "kv_both", "kv_connector_module_path": "recording"}
    # The kinds share a pool. An engine must not find the blocks of another kind.
    settings = {"pool": pool, "salt": kind, "timeout_ms": 5000, "retry_s": 0.2} | KINDS[kind]
    ours = both | {
        "kv_connector": "RecordingConnector",
        "kv_connector_extra_config": settings,
    }
    connector: dict[str, Any] = ours
    if kind.startswith("multi"):
        other = both | {"kv_connector": "RecordedFaults"}
        children = [ours, other] if kind == "multi-ours" else [other, ours]
        connector = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": children},
        }
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


@pytest.fixture
def pool(shm: Path) -> Any:
    """A pool with a block size that no recording evicts from."""
    paths = [shm / "a", shm / "b"]
    with Pool.create(paths, device_size=64 << 20, sparse=True) as pool:
        yield pool


def replayed(path: Path, kind: str, pool_name: str, **settings: Any) -> Replay:
    replay = Replay(path, pool_name, **KINDS[kind] | settings)
    try:
        replay.run()
        assert replay.check() > 0
    finally:
        replay.close()
    return replay


@pytest.mark.parametrize(
    "kind",
    [
        long(kind) if kind in ("async", "multi-other") else kind
        for kind in sorted(path.name.removesuffix(SUFFIX) for path in RECORDED.iterdir())
    ],
)
def test_recorded_calls_of_real_engines_store_only_correct_blocks(
    server: IndexServer, pool_name: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    fake_vllm.installed(monkeypatch)
    try:
        replay = replayed(RECORDED / f"{kind}{SUFFIX}", kind, pool_name)
    finally:
        for name in fake_vllm.OURS:
            sys.modules.pop(f"beluga.connectors.vllm.{name}", None)
    assert replay.hooks["reset"] == 1
    assert ("other" in replay.hooks) is kind.startswith("multi")


def test_loads_that_auto_runs_beside_steps_equal_those_of_async(
    server: IndexServer, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every load is too long here, so vLLM must make the same calls."""
    fake_vllm.installed(monkeypatch)
    monkeypatch.setattr(load_timing, "LIMIT_S", 0.0)
    monkeypatch.setattr(load_timing, "IDLE_LIMIT_S", 0.0)
    try:
        replay = replayed(RECORDED / f"async{SUFFIX}", "async", pool_name, load="auto")
    finally:
        for name in fake_vllm.OURS:
            sys.modules.pop(f"beluga.connectors.vllm.{name}", None)
    assert replay.hooks["matched"] > 0


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
