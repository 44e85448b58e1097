# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""SGLang's pools in addition to the KV: windows, states, indexers and drafts.

A hybrid model has several host pools, and a page of each under the key of the same tokens. A prefix
can be restored at a length where every pool has what it needs there: an indexer the whole prefix,
a window its last pages, a state only the last page. So lengths have gaps, and the backend returns
all of them; SGLang takes the longest that each rank has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from beluga.connectors.sglang.pages import (
    POOL_FIELDS,
    page_buffers,
    rank_fields,
    refuse_wrong,
)
from beluga.errors import ConnectorError, LayoutError

if TYPE_CHECKING:
    from beluga.connectors.identity import Fields

KV = "kv"
_STATES = "mamba"  # each tensor-parallel rank has its part, even where the KV is the same on all
_ERRORS = (ValueError, TypeError, RuntimeError, NotImplementedError, AssertionError, IndexError)


class SidePool:
    """One of SGLang's host pools, registered as ``name``. Its pages are copied in place if SGLang
    returns their addresses, and otherwise by SGLang's own copies. Raises ConnectorError for a pool
    without pages in CPU memory.
    """

    def __init__(self, name: str, host_pool: Any) -> None:
        self.name, self._pool = name, host_pool
        self._tokens = int(getattr(host_pool, "page_size", 0) or 1)
        self._sizes = self._direct_sizes()
        self.direct = bool(self._sizes)
        if not self.direct:
            try:
                page = host_pool.get_dummy_flat_data_page()
                self._sizes = [page.numel() * page.element_size()]
            except (AttributeError, *_ERRORS) as error:
                raise ConnectorError(
                    f"SGLang's pool {name} has no pages that beluga can copy ({error}); start "
                    "SGLang without beluga, or without HiCache for this model"
                ) from error
        if not sum(self._sizes):
            raise ConnectorError(
                f"SGLang's pool {name} has pages without bytes; start SGLang without beluga for "
                "this model"
            )

    def fields(self, config: Any) -> Fields:
        """Return the fields that determine a page's bytes, in addition to the model."""
        found: Fields = {
            "pool_name": self.name,
            "pool": type(self._pool).__name__,
            "layout": str(getattr(self._pool, "layout", "")),
            "sizes": str(self._sizes),
            "dtypes": str(
                [str(getattr(self._pool, f"{part}_dtype", "")) for part in ("temporal", "conv")]
            ),
            "form": "direct" if self.direct else "flat",
        }
        found |= {name: str(getattr(self._pool, name, "")) for name in POOL_FIELDS}
        return found | rank_fields(config, replicated=self._replicated(config))

    def targets(self, keys: Sequence[str], host_indices: Any) -> list[Any]:
        """Return memory for the pages with these keys: in place, or copies for :meth:`take`."""
        if self.direct:
            return list(page_buffers(self._pool, host_indices, len(keys)))
        refuse_wrong(self._pool, host_indices, len(keys))
        return [self._pool.get_dummy_flat_data_page() for _ in keys]

    def take(self, host_indices: Any, targets: Sequence[Any], done: Sequence[bool]) -> None:
        """Copy the pages that were fetched to their places, if they are not in place."""
        if self.direct:
            return
        for place, (target, fetched) in enumerate(zip(targets, done, strict=True)):
            if fetched:
                self._pool.set_from_flat_data_page(self._first(host_indices, place), target)

    def sources(self, keys: Sequence[str], host_indices: Any) -> list[Any]:
        """Return the pages with these keys. Raises LayoutError."""
        if self.direct:
            return list(page_buffers(self._pool, host_indices, len(keys)))
        refuse_wrong(self._pool, host_indices, len(keys))
        try:
            return [
                self._pool.get_data_page(self._first(host_indices, place), flat=True).contiguous()
                for place in range(len(keys))
            ]
        except _ERRORS as error:
            raise LayoutError(f"SGLang does not copy its pool {self.name}: {error}") from error

    def _first(self, host_indices: Any, place: int) -> int:
        return int(host_indices[place * self._tokens])

    def _direct_sizes(self) -> list[int]:
        """Return the sizes of a page's buffers, or nothing if SGLang does not return these."""
        try:
            indices = _tensor(np.arange(self._tokens))
            _, sizes = self._pool.get_page_buffer_meta(indices)
            return [int(size) for size in sizes]
        except (AttributeError, *_ERRORS):
            return []

    def _replicated(self, config: Any) -> bool:
        """Return whether all tensor-parallel ranks have the same pages. SGLang's first rank then
        stores them for all.
        """
        sharded = self.name == _STATES or "MHA" in type(self._pool).__name__
        return bool(config.is_mla_model) and not sharded


def restorable(
    kv_pages: int, needs: Sequence[tuple[str, int, Sequence[bool]]]
) -> tuple[list[int], dict[str, int]]:
    """Return the lengths, in pages, at which a prefix can be restored, and the longest one of each
    pool.

    ``kv_pages`` are the leading pages with KV. ``needs`` has for each pool its name, how many of
    the last pages it needs (0: all), and which pages there are.
    """
    lengths, longest = list(range(1, kv_pages + 1)), {KV: kv_pages} if kv_pages else {}
    for name, last, there in needs:
        run, own = 0, set[int]()
        for length in range(1, kv_pages + 1):
            run = run + 1 if there[length - 1] else 0
            if run >= (min(last, length) if last else length):
                own.add(length)
        if own:
            longest[name] = max(own)
        lengths = [length for length in lengths if length in own]
    return lengths, longest


def _tensor(indices: Any) -> Any:
    """Return indices as SGLang passes them: a tensor, where torch is installed."""
    try:
        import torch
    except ImportError:
        return indices
    return torch.from_numpy(indices)
