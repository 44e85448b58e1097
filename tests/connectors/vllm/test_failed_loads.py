# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A failed load is a miss, even if MultiConnector has created our connector."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from beluga.connectors.vllm import policy
from beluga.connectors.vllm.policy import recompute_failed_loads


class Config:
    """A configuration of an engine with a connector."""

    def __init__(self) -> None:
        self.kv_transfer_config: Any = transfer()


def transfer() -> Any:
    return SimpleNamespace(kv_load_failure_policy="fail")


def made(vllm_config: Config) -> bool:
    return recompute_failed_loads(vllm_config)


def made_by_another(vllm_config: Config) -> bool:
    """Make the connector as vLLM's MultiConnector does."""
    own = copy.copy(vllm_config)
    own.kv_transfer_config = transfer()
    return made(own)


def test_the_policy_of_an_engine_with_one_connector_is_set() -> None:
    config, other = Config(), Config()
    other.kv_transfer_config = None
    assert not made(config)
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"


def test_the_policy_is_set_through_wrapping_connectors() -> None:
    config = Config()
    assert made_by_another(config)
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"


@pytest.mark.parametrize(("device", "count"), [("cpu", 1), ("cuda", 0)])
def test_amx_is_requested_where_the_engine_computes_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, device: str, count: int
) -> None:
    calls: list[Any] = []
    cpu = SimpleNamespace(_init_amx=lambda: calls.append(1))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cpu=cpu))
    policy.permit_amx(device)
    assert len(calls) == count


def test_a_torch_without_tiles_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cpu=SimpleNamespace()))
    policy.permit_amx("cpu")
