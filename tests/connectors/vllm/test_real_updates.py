# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Weights of a real vLLM are reloaded: nothing of the old ones is hit, and nothing is mixed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from beluga import IndexServer, Pool

HERE = Path(__file__).parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_after_a_reload_no_block_of_the_former_weights_is_hit(
    vllm_python: str, tiny_model: Path, server: IndexServer, pool_name: str, tmp_path: Path
) -> None:
    words = [pool_name, str(tiny_model), str(tmp_path / "other")]
    done = subprocess.run(
        [vllm_python, str(HERE / "updates_role.py"), *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "before": 384,
        "on old KV of its own": 0,
        "after the update": 0,
        "again": 384,
        "differs": True,
        "back": 0,
        "back is the same": True,
    }


@pytest.fixture(scope="module")
def wrong_blocks(
    vllm_python: str, memory_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, list[int]]]:
    """The blocks of a prompt that are wrong after an update, by the step that is left out."""
    folder = tmp_path_factory.mktemp("updates")
    device = memory_root / f"beluga-{folder.parent.name}-{folder.name}"
    try:
        with Pool.create([device], device_size=64 << 20, lane_count=32) as pool, IndexServer(pool):
            done = subprocess.run(
                [vllm_python, str(HERE / "update_bytes_role.py"), str(device), str(folder)],
                check=False,
                capture_output=True,
                text=True,
                timeout=600,
            )
        assert done.returncode == 0, done.stderr[-4000:]
        yield json.loads(done.stdout.splitlines()[-1])
    finally:
        device.unlink(missing_ok=True)


def test_after_an_update_all_bytes_are_of_the_new_weights(
    wrong_blocks: dict[str, list[int]],
) -> None:
    assert wrong_blocks["nothing"] == []


@pytest.mark.parametrize("step", ["the calls of the workers", "the notice", "an era of its own"])
def test_without_a_step_after_an_update_bytes_are_wrong(
    wrong_blocks: dict[str, list[int]], step: str
) -> None:
    """The first two blocks are of the old weights."""
    assert {0, 1} <= set(wrong_blocks[step])
