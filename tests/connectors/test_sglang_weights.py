# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Weights: SGLang never loads KV of other weights, nor any from before a clear."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_parts import (
    LONG_S,
    Config,
    HostPool,
    Make,
    indices,
    keys,
    made_backends,
    sglang_scheduler,
)
from support.blocks import eventually

from beluga import IndexServer, Pool
from beluga.connectors.sglang import weights
from beluga.errors import ConnectorError


@pytest.fixture
def lone_backend(monkeypatch: pytest.MonkeyPatch, pool_name: str) -> Iterator[Make]:
    yield from made_backends(monkeypatch, pool_name)


@pytest.fixture
def settings_in_context(backend: Make) -> dict[str, Any]:
    """SGLang's settings."""
    settings: dict[str, Any] = sys.modules["sglang.srt.runtime_context"].get_context().values
    return settings


@pytest.fixture
def updater(
    backend: Make, settings_in_context: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """SGLang's scheduler in this process, which can change its weights."""
    settings = sys.modules["sglang.srt.runtime_context"].get_context()
    for name, module in sglang_scheduler(settings).items():
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, module)
    return sys.modules["sglang.srt.managers.scheduler_components.weight_updater"].updater


def put(cache: Any, count: int = 2) -> list[bool]:
    stored: list[bool] = cache.batch_set_v1(keys(count), indices(list(range(count))))
    return stored


def finds(cache: Any, count: int = 2) -> int:
    """Return how many pages it finds. A lookup and a fetch must agree."""
    hits: int = cache.batch_exists(keys(count))
    assert cache.batch_get_v1(keys(count), indices(list(range(count)))) == [
        i < hits for i in range(count)
    ]
    return hits


def found_by(backend: Make, **settings: Any) -> int:
    """Return how many pages a new engine finds."""
    cache = backend(**settings)
    try:
        return finds(cache)
    finally:
        cache.close()


def test_a_clear_ends_the_pages_of_one_model_and_rank_which_can_be_put_again(backend: Make) -> None:
    cache, other = backend(), backend()
    unrelated = [backend(rank=Config(tp_rank=1)), backend(rank=Config(model_name="other"))]
    for each in (cache, *unrelated):
        assert put(each) == [True, True]
    assert finds(other) == 2
    cache.clear()
    assert finds(cache) == finds(other) == found_by(backend) == 0
    assert [finds(each) for each in unrelated] == [2, 2]
    assert put(other, 1) == [True]
    assert finds(cache) == 1


def test_ranks_that_share_their_pages_may_all_clear(backend: Make) -> None:
    ranks = [
        backend(HostPool(mla=True), rank=Config(is_mla_model=True, tp_rank=rank)) for rank in (0, 1)
    ]
    assert put(ranks[0]) == [True, True]
    for rank in ranks:
        rank.clear()
    assert put(ranks[0]) == [True, True]
    assert [finds(rank) for rank in ranks] == [2, 2]


def test_a_clear_without_a_server_is_executed_later(pool: Pool, lone_backend: Make) -> None:
    with IndexServer(pool):
        cache, other = lone_backend(timeout_ms=1000), lone_backend(timeout_ms=1000)
        assert put(cache) == [True, True]
    assert finds(cache) == 0
    with pytest.raises(ConnectorError, match="not cleared"):
        cache.clear()
    with IndexServer(pool):
        assert eventually(lambda: other.batch_exists(keys(2)) == 2, LONG_S)
        assert eventually(lambda: cache.attached, LONG_S)
        assert finds(cache) == 0
        assert finds(other) == 0


def test_weights_of_another_version_have_another_identity(
    backend: Make, settings_in_context: dict[str, Any]
) -> None:
    cache = backend()
    assert put(cache) == [True, True]
    settings_in_context["weight_version"] = "step-1"
    assert finds(cache) == 0
    assert put(cache, 1) == [True]
    assert found_by(backend) == 1
    settings_in_context["weight_version"] = "default"
    assert finds(cache) == 2


def test_a_named_update_starts_empty_and_engines_with_its_name_share(
    backend: Make, updater: Any
) -> None:
    cache = backend()
    assert put(cache) == [True, True]
    updater.update("step-1")
    assert finds(cache) == 0
    assert put(cache) == [True, True]
    assert found_by(backend) == 2


def test_a_reused_version_has_another_identity_after_an_update(
    backend: Make, updater: Any, settings_in_context: dict[str, Any]
) -> None:
    cache = backend()
    assert put(cache) == [True, True]
    updater.update_weights_from_disk(update_request(settings_in_context["weight_version"]))
    assert finds(cache) == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda updater: updater.update(),
        lambda updater: updater.update("step-1", flush_cache=False),
        lambda updater: (setattr(updater, "idle", False), updater.update("step-1")),
        lambda updater: updater.flush_cache_after_weight_update(
            update_request(), False, "the draft model failed"
        ),
        lambda updater: (
            sys.modules[weights._RUNNER].WeightUpdater().end_weight_update(run_post_load=True)
        ),
    ],
    ids=["unnamed", "not flushed", "not idle", "without the draft model", "by others' hands"],
)
def test_after_an_update_with_unknown_outcome_the_pool_is_unused_until_the_next(
    backend: Make, updater: Any, caplog: pytest.LogCaptureFixture, change: Callable[[Any], None]
) -> None:
    cache, _ = backend(), backend()
    assert put(cache) == [True, True]
    change(updater)
    assert finds(cache) == 0
    assert put(cache) == [False, False]
    assert caplog.text.count("weights were changed without a weight_version, or without") == 1
    updater.idle = True
    updater.update("step-2")
    assert put(cache, 1) == [True]
    assert finds(cache) == 1


def update_request(version: str | None = "step-1", **fields: Any) -> Any:
    return types.SimpleNamespace(**{"weight_version": version, "flush_cache": True} | fields)


@pytest.mark.parametrize("fault", [RuntimeError("half of them are written"), False])
@pytest.mark.parametrize("how", ["disk", "distributed", "tensor", "ipc"])
def test_after_a_failed_update_the_pool_is_unused_until_one_succeeds(
    backend: Make, updater: Any, how: str, fault: Any
) -> None:
    """The weights may be a mix of old and new."""
    cache = backend()
    write = getattr(updater, f"update_weights_from_{how}")
    assert put(cache) == [True, True]
    updater.fault = fault
    if fault is False:
        assert not write(update_request()).success
    else:
        with pytest.raises(RuntimeError, match="half"):
            write(update_request())
    assert (finds(cache), put(cache)) == (0, [False, False])
    updater.fault = None
    assert write(update_request("step-2")).success
    assert (finds(cache), put(cache), finds(cache)) == (0, [True, True], 2)


def test_while_a_session_of_updates_is_open_the_pool_is_not_used(
    backend: Make, updater: Any
) -> None:
    """Each update of a session has its version and its flush, before the last one is written."""
    cache = backend()
    updater.begin_weight_update(update_request())
    assert finds(cache) == 0
    for _ in range(2):
        updater.update_weights_from_tensor(update_request())
        assert (finds(cache), put(cache)) == (0, [False, False])
    updater.end_weight_update(update_request())
    assert (finds(cache), put(cache), finds(cache)) == (0, [True, True], 2)
    updater.begin_weight_update(update_request())
    updater.fault = False
    updater.end_weight_update(update_request())
    assert (finds(cache), put(cache)) == (0, [False, False])


@pytest.mark.parametrize("settings", [{}, {"identity": "training 7"}], ids=str)
def test_an_updated_version_names_weights_only_within_one_run_or_one_training(
    backend: Make, updater: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    """Two trainings of one model may give version 1 to different weights."""
    monkeypatch.setenv("SGLANG_RUN_ID", "a")
    backend(**settings)
    updater.update("1")
    assert put(backend(**settings)) == [True, True]
    assert found_by(backend, **settings) == 2
    monkeypatch.setenv("SGLANG_RUN_ID", "b")
    assert found_by(backend, **settings) == (2 if settings else 0)
    assert found_by(backend, identity="training 8") == 0


@pytest.mark.parametrize("tags", [None, [], ["weights"], ["kv_cache", "weights"]])
def test_released_weights_are_unknown_until_an_update_writes_them(
    backend: Make, updater: Any, settings_in_context: dict[str, Any], tags: Any
) -> None:
    cache = backend()
    assert put(cache) == [True, True]
    updater.release_memory_occupation(types.SimpleNamespace(tags=["kv_cache"]))
    assert finds(cache) == 2
    settings_in_context["enable_weights_cpu_backup"] = True
    updater.release_memory_occupation(types.SimpleNamespace(tags=tags))
    assert finds(cache) == 2  # they have a copy in host memory
    settings_in_context["enable_weights_cpu_backup"] = False
    updater.release_memory_occupation(types.SimpleNamespace(tags=tags))
    assert (finds(cache), put(cache)) == (0, [False, False])
    updater.update_weights_from_disk(update_request())
    assert (put(cache), finds(cache)) == ([True, True], 2)


def test_weights_can_be_named_after_an_update(
    backend: Make, updater: Any, settings_in_context: dict[str, Any]
) -> None:
    cache = backend()
    updater.update()
    assert put(cache) == [False, False]
    settings_in_context["weight_version"] = "step-1"
    assert put(cache) == [True, True]
    updater.update(flush_cache=False)
    settings_in_context["weight_version"] = "step-2"
    assert put(cache) == [False, False]  # the origin of pages that SGLang still has is unknown


def test_pages_computed_before_a_named_update_are_stored_under_the_old_name(
    backend: Make, updater: Any, settings_in_context: dict[str, Any]
) -> None:
    """Between the new name and the flush, SGLang's threads store what the old weights have
    computed.
    """
    cache = backend()
    settings_in_context["weight_version"] = "step-1"
    assert put(cache) == [True, True]
    updater.update("step-1")
    assert finds(cache) == 0


DIFFERENT: list[dict[str, Any]] = [
    {"model_path": "org/model-2"},
    {"revision": "d" * 40},
    {"model_loader_extra_config": "{}"},
    {"attention_backend": "triton"},
    {"of_a_new_release": 1},
    {"kv_cache_dtype": "fp8_e5m2"},
    {"dtype": "float16"},
    {"quantization": "awq"},
    {"json_model_override_args": '{"rope_theta": 1}'},
    {"context_length": 131072},
]
ALIKE: list[dict[str, Any]] = [
    {"port": 2},
    {"log_level": "x"},
    # as a prefill engine has them
    {"disaggregation_mode": "x", "load_balance_method": "y", "cuda_graph_config": "z"},
    # as they follow from the memory that is free
    {"max_running_requests": 7, "max_total_tokens": 5, "pp_max_micro_batch_size": 3},
]


def test_engines_share_pages_unless_their_settings_or_weights_may_differ(
    backend: Make, settings_in_context: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"w")
    (tmp_path / "config.json").write_text('{"rope_scaling": {"rope_type": "yarn"}}')
    for model in ({}, {"model_path": str(tmp_path)}):
        settings_in_context.update(model)
        usual = dict(settings_in_context)
        assert put(backend()) == [True, True]
        for difference in (*DIFFERENT, *ALIKE):
            if model and difference.keys() & {"model_path", "revision"}:
                continue  # the bytes of a folder count
            settings_in_context.clear()
            settings_in_context.update(usual | difference)
            assert found_by(backend) == (2 if difference in ALIKE else 0), difference
        settings_in_context.clear()
        settings_in_context.update(usual)


@pytest.mark.parametrize("kind", ["scales", "adapter", "dummy weights"])
def test_files_and_seeds_that_settings_name_are_part_of_the_identity(
    backend: Make, settings_in_context: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "adapter.safetensors"
    file.write_bytes(b"one")
    adapter = types.SimpleNamespace(lora_name="a", lora_path=str(tmp_path))
    settings_in_context |= {
        "scales": {"quantization_param_path": str(file)},
        "adapter": {"lora_paths": [adapter]},
        "dummy weights": {"load_format": "dummy", "random_seed": 1},
    }[kind]
    assert put(backend()) == [True, True]
    assert found_by(backend) == 2
    file.write_bytes(b"two")
    if kind == "dummy weights":
        settings_in_context["random_seed"] = 2
    assert found_by(backend) == 0


@pytest.mark.parametrize(
    "name", ["SGLANG_USE_HND_KVCACHE", "SGLANG_SIMULATE_UNIFORM_EXPERTS", "SGL_USE_FP8_GEMM"]
)
def test_environment_variables_that_select_kernels_are_part_of_the_identity(
    backend: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert put(backend()) == [True, True]
    for other in ("SGLANG_LOG_GC", "SGLANG_PORT", "OTHER_FP8"):
        monkeypatch.setenv(other, "1")
    assert found_by(backend) == 2
    monkeypatch.setenv(name, "1")
    assert put(backend(), 1) == [True]
    assert found_by(backend) == 1
    monkeypatch.setenv(name, "0")
    assert found_by(backend) == 0


@pytest.mark.parametrize(
    "difference",
    [
        {"revision": None},
        {"revision": "main"},
        {"model_path": ""},
        {"load_format": "remote_instance"},
        {"custom_weight_loader": ["a.b"]},
        {"lora_paths": [types.SimpleNamespace(lora_name="a", lora_path="org/a")]},
    ],
    ids=lambda difference: next(iter(difference)),
)
def test_unidentified_weights_are_rejected_without_an_operators_identity(
    backend: Make, settings_in_context: dict[str, Any], difference: dict[str, Any]
) -> None:
    settings_in_context.update(difference)
    with pytest.raises(ConnectorError, match="setting identity"):
        backend()
    assert put(backend(identity="release 7")) == [True, True]
    assert found_by(backend, identity="release 7") == 2
    assert found_by(backend, identity="release 8") == 0


def test_releases_that_mix_adapters_are_refused(lone_backend: Make) -> None:
    refusal = pytest.raises(ConnectorError, match=r"sglang#38577.*needs SGLang 0\.5\.20 or later")
    sys.modules["sglang.version"].__version__ = "0.5.19"  # type: ignore[attr-defined]
    with refusal:
        lone_backend()
    for old in "0.5.9", "0.4.10.post2", "0.5.20rc1", "0.5.20.dev7+gabc", "0.0.0.dev0", "?":
        with refusal:
            weights.check_release(old)
    for version in "0.5.20", "0.5.20.post1", "0.5.23", "0.6.0", "1.0.0.dev1":
        weights.check_release(version)


def test_a_scheduler_whose_updates_cannot_be_observed_is_rejected(
    lone_backend: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, weights._SCHEDULER, types.ModuleType("scheduler"))
    with pytest.raises(ConnectorError, match="SGLang changes its weights in an unknown way"):
        lone_backend()
