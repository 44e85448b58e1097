# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Computes where the bytes of a block lie, in the engine and in the pool.

A layout has an offset for each index of each axis (layers, K/V, blocks, tokens, heads); an address
is a sum of offsets. In the pool the axes of a block have their own :class:`Order`. Axes that are
dense on both sides are merged into one run. The other axes are enumerated once, when the layout is
made, by array operations. Addresses are in bounds because the views are (``view.py``) and the
numbers of blocks are checked.

``arrangements.py`` has the layouts of inference engines.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from beluga.errors import LayoutError
from beluga.transfer.plan import Plan, pack_rows, plan_blocks, plan_rows, whole_numbers

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from beluga.transfer.view import View


AXES = ("layer", "kv", "block", "token", "head", "dim")


class Order(enum.Enum):
    """The axes of a block in the pool, slowest first."""

    DENSE = ("layer", "kv", "token", "head")
    HEADS = ("layer", "kv", "head", "token")  # the order of a page with its heads outside
    TOKENS = ("token", "layer", "kv", "head")  # one token's bytes are one run


class Rows(NamedTuple):
    """The arguments of :func:`~beluga.transfer.plan.plan_rows`: arrays of shape (rows,)."""

    addresses: NDArray[np.uint64]
    blocks: NDArray[np.int64]
    places: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def packed(self) -> NDArray[np.void]:
        """Return them as an array of :data:`~beluga.transfer.plan.ROW`, for C."""
        return pack_rows(*self)


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    """Slots for tokens in an engine's blocks: block * ``layout.block_size`` + token."""

    layout: BlockLayout
    slots: ArrayLike

    def rows(self, tokens: ArrayLike, block_count: int) -> Rows:
        """Return the rows of ``tokens``, of which each slot has one.

        ``tokens`` has shape (count, 2): one of ``block_count`` blocks, and a token of that block.
        For a single block, shape (count,) suffices. Raises LayoutError.
        """
        pairs, slots = whole_numbers(tokens, "tokens"), whole_numbers(self.slots, "slots")
        if pairs.ndim == 1 and (block_count == 1 or not pairs.size):
            pairs = np.stack([np.zeros_like(pairs), pairs], axis=1)
        if pairs.ndim != 2 or pairs.shape[1] != 2 or slots.shape != (len(pairs),):
            raise LayoutError(
                f"tokens of shape {pairs.shape} of {block_count} blocks for slots of shape "
                f"{slots.shape}; give each its block and its token"
            )
        blocks = pairs[:, 0]
        if blocks.size and not (blocks.min() >= 0 and blocks.max() < block_count):
            raise LayoutError(
                f"tokens lie in blocks {blocks.min()} to {blocks.max()}; their numbers must be "
                f"from 0 to {block_count - 1}"
            )
        if self.layout.read_only:
            raise LayoutError("the target slots' memory is read-only")
        return self.layout.rows(blocks, pairs[:, 1], slots)


class BlockLayout:
    """The blocks of an engine, in ``views`` of one shape: one for each layer, unless layers are an
    axis.

    ``axes`` names the axes of the views by words of :data:`AXES`. ``dim`` is last and dense: the
    bytes of a head, or of a token if there are no heads. ``order`` is the order in the pool; None
    takes DENSE, or HEADS if the heads lie outside of the tokens. Raises
    :class:`~beluga.errors.LayoutError`.
    """

    def __init__(
        self, views: Sequence[View], axes: Sequence[str], order: Order | None = None
    ) -> None:
        first = views[0] if views else None
        if first is None or any(
            (view.shape, view.strides, view.item_size)
            != (first.shape, first.strides, first.item_size)
            for view in views
        ):
            raise LayoutError("a layout needs views of one shape, strides and element size")
        axes = tuple(axes)
        if len(axes) != len(first.shape) or len(set(axes)) < len(axes) or not {*axes} <= {*AXES}:
            raise LayoutError(f"shape {first.shape} needs one axis name of {AXES} each, not {axes}")
        dense = first.shape[-1] == 1 or first.strides[-1] == first.item_size
        if axes[-1] != "dim" or not dense or "block" not in axes:
            raise LayoutError(f"axes {axes} with strides {first.strides}: dim is last and dense")
        if len(views) > 1 and "layer" in axes:
            raise LayoutError("layers are an axis of one view, or have a view each")
        self.views = tuple(views)
        self.owners = tuple(view.owner for view in views)
        self.read_only = any(view.read_only for view in views)
        self._steps = _steps(first, axes)
        self._offsets = {
            axis: np.arange(count, dtype=np.int64) * step
            for axis, (count, step) in self._steps.items()
        }
        if "layer" not in axes:
            starts = [view.start - first.start for view in views]
            self._offsets["layer"] = np.array(starts, np.int64)
        self.unit = first.shape[-1] * first.item_size
        self._start = first.start
        self.order = order or self._order_of_views()

    @property
    def block_count(self) -> int:
        """Blocks that the engine has."""
        return self._steps["block"][0]

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._steps["token"][0]

    @property
    def length(self) -> int:
        """Bytes of a block."""
        return self.unit * math.prod(len(self._offsets[axis]) for axis in self.order.value)

    @property
    def declared(self) -> str:
        """A text that is equal for layouts whose blocks have the same arrangement in the pool.

        It belongs in a namespace.
        """
        counts = [f"{axis}={len(self._offsets[axis])}" for axis in self.order.value]
        return f"{','.join(counts)},unit={self.unit}"

    @functools.cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each fragment of a block, in the pool's order: shape (fragments,)."""
        return np.full(len(self._fragments[0]), self._fragments[1], np.int64)

    def addresses(self, block_ids: ArrayLike) -> NDArray[np.uint64]:
        """Return the address of each fragment of each block: shape (blocks, fragments).

        Raises LayoutError for numbers that are not blocks of the engine.
        """
        ids = self._within(block_ids, self.block_count, "block")
        if ids.ndim != 1:
            raise LayoutError(
                f"blocks must be a list of numbers, not an array of shape {ids.shape}"
            )
        start = self._start + ids * self._steps["block"][1]
        return (start[:, None] + self._fragments[0][None, :]).astype(np.uint64)

    def plan(self, block_ids: ArrayLike, offsets: ArrayLike, *, chunk_size: int = 0) -> Plan:
        """Plan whole blocks, which lie at these offsets of the pool; see :func:`plan_blocks`."""
        return plan_blocks(
            self.addresses(block_ids),
            self.sizes,
            offsets,
            chunk_size=chunk_size,
            owners=self.owners,
            read_only=self.read_only,
        )

    def rows(self, blocks: ArrayLike, tokens: ArrayLike, slots: ArrayLike) -> Rows:
        """Return the rows that take ``tokens[i]`` of block ``blocks[i]`` to ``slots[i]``.

        ``blocks`` are indices of a list of the pool's blocks. A slot is a block of
        the engine * :attr:`block_size` + a token. Raises LayoutError.
        """
        size = self.block_size
        which = whole_numbers(blocks, "blocks")
        token = self._within(tokens, size, "token")
        slot = self._within(slots, size * self.block_count, "slot")
        if not which.shape == token.shape == slot.shape or which.ndim != 1:
            raise LayoutError(
                f"{which.shape} blocks, {token.shape} tokens, {slot.shape} slots; give one of each"
            )
        engine, places, pool_step, run = self._token_runs
        start = self._start + slot // size * self._steps["block"][1]
        start += slot % size * self._steps["token"][1]
        count = len(engine)
        return Rows(
            (start[:, None] + engine[None, :]).reshape(-1).astype(np.uint64),
            np.repeat(which, count),
            (token[:, None] * pool_step + places[None, :]).reshape(-1),
            np.full(len(token) * count, run, np.int64),
        )

    def plan_rows(
        self,
        rows: Rows,
        *,
        offsets: ArrayLike,
        chunk_size: int = 0,
        checksums: NDArray[np.uint32] | None = None,
    ) -> Plan:
        """Plan the reading of ``rows`` from the blocks at ``offsets`` of the pool.

        See :func:`~beluga.transfer.plan.plan_rows` for the checksums that are compared.
        """
        return plan_rows(
            *rows,
            offsets=offsets,
            length=self.length,
            chunk_size=chunk_size,
            checksums=checksums,
            owners=self.owners,
            read_only=self.read_only,
        )

    def _order_of_views(self) -> Order:
        tokens, heads = self._steps["token"], self._steps["head"]
        return Order.HEADS if heads[0] > 1 and heads[1] > tokens[1] else Order.DENSE

    def _within(self, numbers: ArrayLike, count: int, what: str) -> NDArray[np.int64]:
        found = whole_numbers(numbers, f"{what}s")
        if found.size and (found.min() < 0 or found.max() >= count):
            raise LayoutError(
                f"{what}s {found.min()} to {found.max()} are needed; shape "
                f"{self.views[0].shape} has {count}"
            )
        return found

    @functools.cached_property
    def _fragments(self) -> tuple[NDArray[np.int64], int]:
        """The offset of each run from the block's start, in the pool's order; the size of a run."""
        axes = list(self.order.value)
        run = self.unit
        while axes and self._dense(axes[-1], run):
            run *= len(self._offsets[axes.pop()])
        return _sums([self._offsets[axis] for axis in axes]), run

    @functools.cached_property
    def _token_runs(self) -> tuple[NDArray[np.int64], NDArray[np.int64], int, int]:
        """The runs of one token: their offsets in the engine, their offsets in the payload (both
        from the first), the distance of two tokens in the payload, and the size of a run."""
        steps, step = {}, self.unit
        for axis in reversed(self.order.value):
            steps[axis] = step
            step *= len(self._offsets[axis])
        axes = [axis for axis in self.order.value if axis != "token"]
        run = self.unit
        while axes and steps[axes[-1]] == run and self._dense(axes[-1], run):
            run *= len(self._offsets[axes.pop()])
        engine = _sums([self._offsets[axis] for axis in axes])
        counts = [np.arange(len(self._offsets[axis])) * steps[axis] for axis in axes]
        return engine, _sums(counts), steps["token"], run

    def _dense(self, axis: str, run: int) -> bool:
        offsets = self._offsets[axis]
        return bool((offsets == np.arange(len(offsets)) * run).all())


def _steps(view: View, axes: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Return count and stride in bytes of each axis; an axis that is missing has 1 and 0."""
    steps = dict.fromkeys(AXES, (1, 0))
    for axis, count, step in zip(axes, view.shape, view.strides, strict=True):
        if count > 1 and step <= 0:
            raise LayoutError(f"axis {axis} of shape {view.shape} has a stride of {step} bytes")
        steps[axis] = (count, step)
    return steps


def _sums(offsets: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the sums of all combinations of one offset from each array, the last fastest."""
    total = np.zeros(1, np.int64)
    for part in offsets:
        total = (total[:, None] + part[None, :]).reshape(-1)
    return total
