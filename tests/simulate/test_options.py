# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The options of the simulator: the defaults of a cluster, and invalid values."""

from __future__ import annotations

from typing import Any

import pytest

from beluga.errors import SimulateError
from beluga.router import Goals
from beluga.simulate import PRESETS, Options, Scale

GIB = 1 << 30


def test_the_default_cluster_is_that_of_the_reference() -> None:
    options = Options()
    assert (options.workers, options.engine, options.eviction) == (8, "chunked", "lru")
    assert options.pool_bytes == 1950 * GIB
    assert options.local_bytes * 8 == 1950 * GIB
    assert (options.adapter_count, options.device_count) == (4, 8)
    assert (options.path_speed, options.local_bandwidth) == (26e9, 50e9)
    assert (options.step_tokens, options.slots) == (8192, 256)
    assert (options.offload, options.shuffle, options.speed) == (True, True, 1)
    assert options.hbm_bytes == options.model.hbm_bytes
    assert options.step_s == 0.012


def test_a_serial_worker_has_no_steps() -> None:
    assert Options(engine="serial").step_s == 0


def test_explicit_options_replace_defaults() -> None:
    options = Options(hbm=5, bandwidth=7.0, gpu_path="switch", local=3, pool=11)
    assert (options.hbm_bytes, options.path_speed) == (5, 7)
    assert (options.local_bytes, options.pool_bytes) == (3, 11)


def test_the_replay_of_the_reference_has_470_blocks_of_hbm_and_15600_in_all() -> None:
    options = PRESETS["feasibility"](Options(workers=3, speed=2.0))
    block = 512 * options.model.kv_bytes_per_token
    assert (options.workers, options.engine, options.speed) == (8, "serial", 2)
    assert options.hbm_bytes == 470 * block
    assert options.pool_bytes == options.local_bytes * 8 == 15600 * block
    assert (options.adapter_count, options.device_count) == (8, 1000)
    assert (options.offload, options.shuffle) == (False, False)
    assert options.policy_defaults == {"host_credit": 1.0}


@pytest.mark.parametrize("name", ["workers", "step_tokens", "slots", "hbm", "pool", "local",
                                  "adapters", "devices"])  # fmt: skip
def test_every_count_is_at_least_one(name: str) -> None:
    least: dict[str, Any] = {name: 1}
    assert getattr(Options(**least), name) == 1
    with pytest.raises(SimulateError, match=f"{name} is 0, but must be at least 1"):
        Options(**{name: 0})


@pytest.mark.parametrize("name", ["bandwidth", "local_bandwidth", "speed"])
@pytest.mark.parametrize("value", [0.0, float("inf")])
def test_speeds_and_times_are_greater_than_zero_and_finite(name: str, value: float) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(SimulateError, match=f"{name} is {value}, but must be greater than 0"):
        Options(**options)
    assert Options(**{name: 0.5})


def test_all_but_one_worker_may_be_removed() -> None:
    assert Options(workers=2, scale=Scale(0.0, -1)).scale
    with pytest.raises(SimulateError, match="scaling by -2 leaves no worker"):
        Options(workers=2, scale=Scale(0.0, -2))
    assert Options(goals=Goals()).goals
