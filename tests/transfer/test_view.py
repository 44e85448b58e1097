# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Views compute numpy's addresses and reject indices outside of their memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beluga.errors import LayoutError
from beluga.transfer import View
from beluga.transfer.view import DTYPE_SIZES


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    item=st.sampled_from([np.uint8, np.uint16, np.float32]),
)
def test_addresses_match_the_elements(shape: list[int], order: Any, item: type) -> None:
    axes = list(range(len(shape)))
    order.shuffle(axes)
    array = np.arange(np.prod(shape), dtype=item).reshape(shape).transpose(axes)[::-1]
    view = View.of(array)
    for index in np.ndindex(array.shape):
        raw = ctypes.string_at(view.address(*index), array.itemsize)
        assert np.frombuffer(raw, item)[0] == array[index]


@settings(deadline=None)
@given(data=st.data())
def test_slices_and_splits_match_numpy(data: st.DataObject) -> None:
    array = np.arange(4 * 6 * 5, dtype=np.uint16).reshape(4, 6, 5)
    axis = data.draw(st.integers(0, 2))
    start = data.draw(st.integers(0, array.shape[axis] - 1))
    stop = data.draw(st.integers(start + 1, array.shape[axis]))
    part = array[(slice(None),) * axis + (slice(start, stop),)]
    view = View.of(array).slice(axis, start, stop)
    assert (view.start, view.shape, view.strides) == (part.ctypes.data, part.shape, part.strides)
    halves = View.of(array).split(1, 2)
    wanted = array.reshape(4, 3, 2, 5)
    assert (halves.shape, halves.strides) == (wanted.shape, wanted.strides)


@pytest.mark.parametrize("index", [(4,), (-1,), (0, 6), (0, 0, 0, 0)])
def test_the_error_of_an_index_out_of_range_has_the_shape(index: tuple[int, ...]) -> None:
    view = View.of(np.zeros((4, 6, 5), np.uint8))
    with pytest.raises(LayoutError, match=r"shape \(4, 6, 5\)"):
        view.address(*index)


def test_slices_and_splits_out_of_range_are_rejected() -> None:
    view = View.of(np.zeros((4, 6, 5), np.uint8))
    for axis, start, stop in ((0, 0, 5), (0, 2, 2), (3, 0, 1), (1, -1, 2)):
        with pytest.raises(LayoutError):
            view.slice(axis, start, stop)
    for size in (4, 0, 7):
        with pytest.raises(LayoutError):
            view.split(1, size)


def test_sizes_of_elements_are_those_of_their_types() -> None:
    assert DTYPE_SIZES == {"F32": 4, "F16": 2, "BF16": 2, "FP8": 1, "U8": 1}
    for dtype, size in DTYPE_SIZES.items():
        view = View.foreign(4096, 6 * size, shape=(2, 3), dtype=dtype)
        assert view.strides == (3 * size, size)
        assert view.address(1, 2) == 4096 + 5 * size
    with pytest.raises(LayoutError, match="I64"):
        View.foreign(4096, 48, shape=(2, 3), dtype="I64")


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    strides=st.lists(st.integers(0, 50), min_size=3, max_size=3),
    offset=st.integers(0, 20),
    size=st.integers(1, 600),
)
def test_a_view_that_leaves_its_memory_is_refused(
    shape: list[int], strides: list[int], offset: int, size: int
) -> None:
    steps = strides[: len(shape)]
    need = offset + sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) * 2 + 2
    given_ = {"shape": shape, "dtype": "BF16", "element_strides": steps, "offset": offset}
    if need <= size:
        View.foreign(1 << 30, size, **given_)  # type: ignore[arg-type]
        return
    with pytest.raises(LayoutError, match=f"to {need}, but the memory has {size}"):
        View.foreign(1 << 30, size, **given_)  # type: ignore[arg-type]


def test_foreign_memory_keeps_its_owner() -> None:
    owner = object()
    assert View.foreign(4096, 64, shape=(64,), dtype="U8", owner=owner).owner is owner


class Torch:
    """The part of a torch tensor that a view uses."""

    def __init__(self, address: int, shape: tuple[int, ...], steps: tuple[int, ...]) -> None:
        self.data_ptr, self.shape, self.stride = lambda: address, shape, lambda: steps
        self.element_size = lambda: 2


class Cupy:
    """The part of a cupy array that a view uses."""

    shape, strides, dtype = (3, 4), (16, 4), np.dtype(np.float32)
    __cuda_array_interface__ = {"data": (1 << 40, False)}  # noqa: RUF012  as the protocol has it


def test_arrays_of_devices_are_taken_by_their_pointers() -> None:
    tensor = Torch(1 << 41, (2, 5), (1, 2))
    view = View.of(tensor)
    assert (view.start, view.strides, view.item_size) == (1 << 41, (2, 4), 2)
    assert view.memory == (1 << 41, 20)
    assert view.owner is tensor
    assert View.of(Cupy()).address(2, 3) == (1 << 40) + 2 * 16 + 3 * 4
    with pytest.raises(LayoutError, match="list"):
        View.of([1, 2])
