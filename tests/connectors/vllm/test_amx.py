# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The request for the processor's tiles: only for a CPU, and only if torch supports it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from beluga.connectors.vllm import amx


@pytest.mark.parametrize(("device", "count"), [("cpu", 1), ("cuda", 0)])
def test_amx_is_requested_where_the_engine_computes_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, device: str, count: int
) -> None:
    calls: list[Any] = []
    cpu = SimpleNamespace(_init_amx=lambda: calls.append(1))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cpu=cpu))
    amx.permit(device)
    assert len(calls) == count


def test_a_torch_without_tiles_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cpu=SimpleNamespace()))
    amx.permit("cpu")
