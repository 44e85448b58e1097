# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The layouts of vLLM, SGLang and Dynamo, recognized by the shapes of their tensors.

A wrong order of K/V and blocks has the same size and would silently swap K and V. So if a shape
allows both orders, the caller must specify one. It is compared with the shape.
"""

from __future__ import annotations

from collections.abc import Sequence

from beluga.errors import LayoutError
from beluga.transfer.layout import BlockLayout, Order
from beluga.transfer.view import View

KV = 2  # K and V


def vllm(
    views: Sequence[View], *, kv_first: bool | None = None, order: Order | None = None
) -> BlockLayout:
    """Describe vLLM's tensors, one for each layer, of one of these shapes:

    * (2, blocks, block_size, heads, head_size): K and V separate
    * (blocks, 2, block_size, heads, head_size)
    * (blocks, block_size, heads, 2 * head_size): K and V of a head adjacent
    * (blocks, block_size, rank): MLA

    ``kv_first`` distinguishes the first two; it is needed if there are exactly two blocks. The axes
    of tokens and heads are in this order whatever their strides are. Raises LayoutError.
    """
    shape = _shape(views)
    if len(shape) == 5:
        kv = _kv_axis(shape, kv_first)
        axes = ["block", "token", "head", "dim"]
        axes.insert(kv, "kv")
        return BlockLayout(views, axes, order)
    if kv_first is not None or len(shape) not in (3, 4):
        raise LayoutError(f"shape {shape} has no axis of K and V, or is not a layout of vLLM")
    packed = ("block", "token", "head", "dim")
    return BlockLayout(views, packed if len(shape) == 4 else ("block", "token", "dim"), order)


def sglang(view: View, layout: str, *, page_size: int, order: Order | None = None) -> BlockLayout:
    """Describe SGLang's host pool, one tensor of all layers, by its ``layout`` and shape:

    * ``layer_first``: (2, layers, slots, heads, dim), MLA without the first axis
    * ``page_first``: (2, slots, layers, heads, dim), MLA without the first axis
    * ``page_first_direct``: (2, pages, layers, page_size, heads, dim), MLA without the first axis

    A page is ``page_size`` slots. Raises LayoutError.
    """
    supported = {
        "layer_first": ["layer", "slot", "head", "dim"],
        "page_first": ["slot", "layer", "head", "dim"],
        "page_first_direct": ["block", "layer", "token", "head", "dim"],
    }
    if layout not in supported:
        raise LayoutError(
            f"{layout!r} is not a supported layout of SGLang; use {', '.join(supported)}"
        )
    axes = supported[layout]
    if len(view.shape) == len(axes) + 1 and view.shape[0] == KV:
        axes = ["kv", *axes]
    if len(view.shape) != len(axes):
        raise LayoutError(f"shape {view.shape} is not {layout}, which has the axes {axes}")
    if "slot" in axes:
        place = axes.index("slot")
        view = view.split(place, page_size)
        axes = [*axes[:place], "block", "token", *axes[place + 1 :]]
    if view.shape[axes.index("token")] != page_size:
        raise LayoutError(f"shape {view.shape} does not have {page_size} tokens per page")
    return BlockLayout([view], axes, order)


def _shape(views: Sequence[View]) -> tuple[int, ...]:
    if not views:
        raise LayoutError("a layout needs a view")
    return views[0].shape


def _kv_axis(shape: tuple[int, ...], kv_first: bool | None) -> int:
    fits = [axis for axis in (0, 1) if shape[axis] == KV]
    if kv_first is not None:
        fits = [axis for axis in fits if axis == (0 if kv_first else 1)]
    if len(fits) != 1:
        raise LayoutError(
            f"shape {shape} needs one axis of K and V, the first or the second"
            + ("; specify which with kv_first" if len(fits) == 2 else f"; kv_first is {kv_first}")
        )
    return fits[0]
