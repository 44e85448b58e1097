# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Blocks in a device's memory are copied through a buffer; a CPU's memory replaces the device's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from beluga import IndexServer, KVCache, Pool
from beluga.connectors.vllm.layout import GroupLayout
from beluga.connectors.vllm.staging import BlockSource, StagedSource, source_of

torch = pytest.importorskip("torch", reason="torch is not installed")

LAYERS, BLOCKS = 3, 9


def layer_major() -> tuple[Any, dict[str, Any]]:
    memory = torch.zeros((LAYERS, BLOCKS, 2, 16, 32), dtype=torch.bfloat16)
    return memory, {f"layer.{i}": memory[i] for i in range(LAYERS)}


def packed() -> tuple[Any, dict[str, Any]]:
    memory = torch.zeros((BLOCKS, LAYERS, 2, 16, 32), dtype=torch.bfloat16)
    return memory, {f"layer.{i}": memory[:, i] for i in range(LAYERS)}


def keys_apart() -> tuple[Any, dict[str, Any]]:
    memory = torch.zeros((LAYERS, 2, BLOCKS, 16, 32), dtype=torch.bfloat16)
    return memory, {f"layer.{i}": memory[i] for i in range(LAYERS)}


@pytest.mark.parametrize("make", [layer_major, packed, keys_apart])
def test_a_buffer_holds_the_same_bytes(
    make: Callable[[], tuple[Any, dict[str, Any]]], pool: Pool, server: IndexServer
) -> None:
    """A block is stored through a buffer and loaded without one, and vice versa."""
    memory, tensors = make()
    memory.copy_(torch.randn(memory.shape))
    layout = GroupLayout(tensors, block_count=BLOCKS, page_sizes={})
    staged, direct = StagedSource(layout, own_stream=True), BlockSource(layout)
    digests = [bytes([i]) * 32 for i in range(4)]
    with KVCache(pool, namespace="a") as first, KVCache(pool, namespace="b") as second:
        assert first.put(digests, staged.read([8, 1, 5, 2])).stored == 4
        assert second.put(digests, direct.read([8, 1, 5, 2])).stored == 4
        wanted = memory.clone()
        memory.zero_()
        with direct.write([8, 1, 5, 2]) as run:
            assert first.get(digests, run).hits == 4
        _same(wanted, memory, make)
        memory.zero_()
        with staged.write([8, 1, 5, 2]) as run:
            assert second.get(digests, run).hits == 4
        _same(wanted, memory, make)


def _same(wanted: Any, moved_tensor: Any, make: Any) -> None:
    axis = {layer_major: 1, packed: 0, keys_apart: 2}[make]
    moved = torch.tensor([8, 1, 5, 2])
    others = torch.tensor([0, 3, 4, 6, 7])
    assert torch.equal(wanted.index_select(axis, moved), moved_tensor.index_select(axis, moved))
    assert not moved_tensor.index_select(axis, others).any()


def test_a_cpu_needs_no_buffer() -> None:
    _, tensors = layer_major()
    layout = GroupLayout(tensors, block_count=BLOCKS, page_sizes={})
    source = source_of(layout, urgent=True, own_stream=True, logger=logging.getLogger("test"))
    assert type(source) is BlockSource
    assert source.read([1, 2]).fragment_count == LAYERS
    assert np.array_equal(
        source.read([0]).fragments[:, 0], [tensor.data_ptr() for tensor in tensors.values()]
    )
