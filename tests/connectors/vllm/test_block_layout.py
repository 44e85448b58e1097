# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Layouts: every known arrangement gives the same bytes in the same order; others are refused."""

from __future__ import annotations

import numpy as np
import pytest
from vllm_parts import Tensor, layer_major

from beluga import IndexServer, KVCache, Pool
from beluga.connectors.vllm.layout import GroupLayout
from beluga.errors import ConnectorError

LAYERS, BLOCKS, HEADS, TOKENS, SIZE = 3, 7, 2, 16, 32


def fill(memory: np.ndarray) -> None:
    memory[...] = np.random.default_rng(7).integers(0, 1 << 16, memory.shape, dtype=np.uint16)


def layout_of(tensors: dict[str, Tensor]) -> GroupLayout:
    return GroupLayout(tensors, block_count=BLOCKS, page_sizes={})


def packed_block() -> tuple[dict[str, Tensor], np.ndarray]:
    """All layers of a block are adjacent (block-outermost)."""
    memory = np.zeros((BLOCKS, LAYERS, HEADS, TOKENS, 2 * SIZE), dtype=np.uint16)
    return {f"layer.{i}": Tensor(memory[:, i]) for i in range(LAYERS)}, memory


def keys_apart() -> tuple[dict[str, Tensor], np.ndarray]:
    """K of all blocks is followed by V of all blocks."""
    memory = np.zeros((LAYERS, 2, BLOCKS, TOKENS, HEADS, SIZE), dtype=np.uint16)
    return {f"layer.{i}": Tensor(memory[i]) for i in range(LAYERS)}, memory


def tokens_first() -> tuple[dict[str, Tensor], np.ndarray]:
    """Heads come after tokens in memory but before them in the shape (NHD seen as HND)."""
    memory = np.zeros((LAYERS, BLOCKS, TOKENS, HEADS, SIZE), dtype=np.uint16)
    return {f"layer.{i}": Tensor(memory[i].transpose(0, 2, 1, 3)) for i in range(LAYERS)}, memory


def latent() -> tuple[dict[str, Tensor], np.ndarray]:
    """MLA has one latent vector per token and no heads."""
    return layer_major(LAYERS, BLOCKS, TOKENS, 576)


KNOWN = {
    "layer-major": (lambda: layer_major(LAYERS, BLOCKS, HEADS, TOKENS, 2 * SIZE), LAYERS),
    "block-outermost": (packed_block, 1),
    "keys apart": (keys_apart, 2 * LAYERS),
    "tokens first": (tokens_first, LAYERS),
    "latent": (latent, LAYERS),
}


@pytest.mark.parametrize("name", KNOWN)
def test_blocks_are_written_to_the_pool_and_read_back(
    name: str, pool: Pool, server: IndexServer
) -> None:
    make, pieces = KNOWN[name]
    source_tensors, source = make()
    target_tensors, _ = make()
    fill(source)
    source_layout, target_layout = layout_of(source_tensors), layout_of(target_tensors)
    assert len(source_layout.pieces) == pieces
    assert source_layout.block_size == source.nbytes // BLOCKS
    digests = [bytes([i]) * 32 for i in range(3)]
    with KVCache(pool, namespace=name) as cache:
        assert cache.put(digests, source_layout.run([5, 0, 3])).stored == 3
        assert cache.get(digests, target_layout.run([1, 6, 2])).hits == 3
    for tensor, other in zip(source_tensors.values(), target_tensors.values(), strict=True):
        axis = 1 if name == "keys apart" else 0
        assert np.array_equal(
            tensor.array.take([5, 0, 3], axis=axis), other.array.take([1, 6, 2], axis=axis)
        )
        assert not other.array.take([0, 3, 4, 5], axis=axis).any()


def test_the_same_shape_in_another_order_is_another_layout() -> None:
    heads_first, _ = layer_major(LAYERS, BLOCKS, HEADS, TOKENS, SIZE)
    swapped, _ = tokens_first()
    first, second = layout_of(heads_first), layout_of(swapped)
    assert [t.shape for t in heads_first.values()] == [t.shape for t in swapped.values()]
    assert first.block_size == second.block_size
    assert first.declared != second.declared


def test_layers_that_share_memory_count_once() -> None:
    tensors, _ = layer_major(LAYERS, BLOCKS, HEADS, TOKENS, SIZE)
    alone = layout_of(dict(tensors))
    tensors["layer.9"] = tensors["layer.1"]
    assert layout_of(tensors).block_size == alone.block_size


def test_pages_may_be_padded() -> None:
    memory = np.zeros((BLOCKS, HEADS * TOKENS * SIZE + 64), dtype=np.uint16)
    page = memory[:, :-64].reshape(BLOCKS, HEADS, TOKENS, SIZE)
    assert np.shares_memory(page, memory)
    assert layout_of({"layer": Tensor(page)}).block_size == HEADS * TOKENS * SIZE * 2


def test_an_axis_of_length_one_is_ignored_at_any_position() -> None:
    array = np.zeros((BLOCKS, TOKENS, SIZE, 1), dtype=np.uint16)
    layout = layout_of({"layer": Tensor(array)})
    assert layout.block_size == TOKENS * SIZE * 2
    assert len(layout.pieces) == 1


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((TOKENS, BLOCKS, 8)), "is not supported"),
        (np.zeros((BLOCKS + 1, 8, 8)), "is not supported"),
        (np.zeros((BLOCKS, 200, 8))[:, ::2, :4], "100 separate runs"),
        (np.lib.stride_tricks.as_strided(np.zeros(99), (BLOCKS, 4, 4), (64, 8, 8)), "overlap"),
        (
            np.lib.stride_tricks.as_strided(np.zeros(99), (BLOCKS, 4, 4), (8, 32, 8)),
            "blocks overlap",
        ),
    ],
)
def test_an_unknown_layout_is_rejected(array: np.ndarray, message: str) -> None:
    with pytest.raises(ConnectorError, match=message):
        layout_of({"layer": Tensor(array)})


def test_a_layout_with_two_blocks_after_keys_and_values_is_ambiguous() -> None:
    with pytest.raises(ConnectorError, match="is not supported"):
        GroupLayout({"layer": Tensor(np.zeros((2, 2, 8)))}, block_count=2, page_sizes={})


def test_a_page_with_a_size_other_than_declared_is_refused() -> None:
    tensors, _ = layer_major(1, BLOCKS, HEADS, TOKENS, SIZE)
    with pytest.raises(ConnectorError, match="but the engine declares 99"):
        GroupLayout(tensors, block_count=BLOCKS, page_sizes={"layer.0": 99})


@pytest.mark.parametrize("block", [-1, BLOCKS])
def test_addresses_are_inside_the_blocks_of_the_engine(block: int) -> None:
    tensors, _ = layer_major(1, BLOCKS, HEADS, TOKENS, SIZE)
    with pytest.raises(ConnectorError, match="has 7 blocks"):
        layout_of(tensors).run([0, block])


def test_an_empty_list_of_tensors_is_rejected() -> None:
    with pytest.raises(ConnectorError, match="no KV cache"):
        layout_of({})


def test_several_kernel_blocks_form_one_block() -> None:
    memory = np.arange(BLOCKS * 4 * 8, dtype=np.uint16).reshape(BLOCKS * 4, 8)
    tensors = {"layer": Tensor(memory)}
    layout = GroupLayout(tensors, block_count=BLOCKS, page_sizes={"layer": 4 * 16})
    assert layout.block_size == 4 * 16
    assert layout.fragments([2]).tolist() == [[memory.ctypes.data + 2 * 4 * 16, 4 * 16]]
    whole = GroupLayout(
        {"layer": Tensor(memory.reshape(BLOCKS, 4, 8))}, block_count=BLOCKS, page_sizes={}
    )
    assert layout.declared == whole.declared  # the same block
    with pytest.raises(
        ConnectorError, match="is not supported"
    ):  # no field declares these as parts
        GroupLayout(tensors, block_count=BLOCKS, page_sizes={})
    with pytest.raises(ConnectorError, match="is not supported"):
        GroupLayout(tensors, block_count=BLOCKS, page_sizes={"layer": 16})
