# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The HiCacheStorage that SGLang loads by name (``--hicache-storage-backend dynamic``)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult
from sglang.version import __version__ as sglang_version

from beluga.connectors.identity import ModelIdentity, with_weights
from beluga.connectors.settings import EngineSettings, settings_of
from beluga.connectors.sglang import identity
from beluga.connectors.sglang.pages import (
    DIRECT,
    FLAT,
    KV,
    Pages,
    SidePool,
    is_logical,
    page_buffers,
    page_tokens,
    pool_namespace,
    restorable,
)
from beluga.connectors.sglang.weights import UPDATED, WEIGHTS, check_release, this_run
from beluga.transfer import TransferClass, TransferStats

logger = logging.getLogger(__name__)

# settings of SGLang
_SGLANGS = ("backend_name", "module_path", "class_name", "interface_v1")

# SGLang's hit policies of pools whose last pages are enough, and of those that no hit needs
_TRAILING, _OPTIONAL = "trailing_pages", "block_groups"


class BelugaHiCache(HiCacheStorage):
    """The pool as HiCache's L3. Every failure is a miss, and a page that cannot be put is skipped.

    With ``interface_v1`` pages are copied directly between the pool and SGLang's host memory;
    without it, SGLang makes an additional copy of each page. The settings are the fields of
    EngineSettings, in SGLang's extra config. Models with several pools (windows, states, indexers,
    drafts) use the calls that end with ``v2``. Raises ConnectorError for releases whose keys do not
    distinguish LoRA adapters.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        check_release(sglang_version)
        WEIGHTS.watch()
        given = dict(storage_config.extra_config or {})
        self._config = storage_config
        self._settings = settings_of(
            EngineSettings, {name: given[name] for name in given if name not in _SGLANGS}
        )
        self._model = identity.settings()
        self._identity: ModelIdentity | None = None
        self._side: dict[str, SidePool] = {}
        self._logical = False  # whether the pool of the KV has no bytes
        self._pages = Pages(self._settings, self._version)

    @property
    def attached(self) -> bool:
        """Whether the pool is available now. This may change at any time."""
        return self._pages.attached

    @property
    def failure_count(self) -> int:
        """The number of failed calls, which counted as misses."""
        return self._pages.failure_count

    def transfer_stats(self) -> dict[TransferClass, TransferStats]:
        """Return the admissions of the host's link, by class, with their waiting times."""
        return self._pages.transfer_stats()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register SGLang's host pool, which determines the layout of pages. Until a thread has
        identified the weights, every page is a miss.
        """
        word, tokens = self._settings.identity, page_tokens(self._config, mem_pool_host)
        fields = identity.config_of(self._model, word)
        base = pool_namespace(self._settings, sglang_version, self._config, mem_pool_host, fields)
        self._logical = is_logical(mem_pool_host)

        def register(weights: str) -> None:
            self._pages.register(with_weights(base, weights), page_tokens=tokens)

        self._identity = identity.identify(self._model, word, logger=logger, then=register)
        super().register_mem_pool_host(mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register one of the pools of a hybrid model. Raises ConnectorError for a pool without
        pages in CPU memory.
        """
        name = str(host_pool_name)
        if name != KV:  # the KV pool is registered already
            side = SidePool(name, host_pool)
            self._pages.add(name, side.fields(self._config))
            self._side[name] = side
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        """Return how many leading pages can be restored with what every pool has, each pool's own
        longest prefix, and all lengths at which a prefix can be restored.
        """
        count = self.batch_exists(keys, extra_info)
        requested = [
            (
                str(transfer.name),
                len(transfer.keys or ()) or 1 if transfer.hit_policy == _TRAILING else 0,
            )
            for transfer in pool_transfers or ()
            if transfer.hit_policy != _OPTIONAL
        ]
        lengths, longest = self._restorable(keys[:count], requested)
        if max(lengths, default=0) < count:
            for name, last in requested:  # pages of a lower tier are onboarded first
                if name in self._side:
                    self._pages.leading(name, keys[max(0, count - last) if last else 0 : count])
            lengths, longest = self._restorable(keys[:count], requested)
        result = PoolTransferResult(max(lengths, default=0), longest)
        if any(field.name == "restorable_prefix_pages" for field in dataclasses.fields(result)):
            result = dataclasses.replace(result, restorable_prefix_pages=lengths)
        return result

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Fetch pages of several pools to their places. Returns which pages were fetched."""

        def fetch(side: SidePool, keys: list[str], host_indices: Any) -> list[bool]:
            made: list[Any] = []

            def targets() -> list[Any]:
                made[:] = side.targets(keys, host_indices)
                return made

            done = self._pages.fetch(side.name, keys, targets, onboard=True)
            if any(done):
                side.take(host_indices, made, done)
            return done

        return self._each(transfers, fetch)

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Put pages of several pools. Returns for each pool which of them the pool has now."""

        def put(side: SidePool, keys: list[str], host_indices: Any) -> list[bool]:
            return self._pages.store(side.name, keys, lambda: side.sources(keys, host_indices))

        return self._each(transfers, put)

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Fetch pages to their places in the host pool. Returns for each whether it was fetched."""
        if self._logical:
            return [bool(self._side)] * len(keys)
        return self._pages.fetch(DIRECT, keys, lambda: self._buffers(keys, host_indices))

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Put pages from their places in the host pool. Returns for each whether the pool has it
        now."""
        if self._logical:
            return [bool(self._side)] * len(keys)
        return self._pages.store(DIRECT, keys, lambda: self._buffers(keys, host_indices))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Fetch one page into a flat tensor. Returns the tensor, or None."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Fetch pages into flat tensors. Returns the tensor of each page that the pool has, and
        None for the others.
        """
        targets = [] if target_locations is None else list(target_locations)
        if len(targets) != len(keys) or any(target is None for target in targets):
            return [None] * len(keys)
        if self._logical:
            return targets if self._side else [None] * len(keys)
        done = self._pages.fetch(FLAT, keys, lambda: targets)
        return [target if fetched else None for target, fetched in zip(targets, done, strict=True)]

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Put one page, a flat tensor. Returns whether the pool has it now."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Put pages, flat tensors. Returns whether the pool has all of them now."""
        sources = [] if values is None else list(values)
        if len(sources) != len(keys) or any(source is None for source in sources):
            return False
        if self._logical:
            return bool(self._side)
        return all(
            self._pages.store(FLAT, keys, lambda: [source.contiguous() for source in sources])
        )

    def exists(self, key: str) -> bool:
        """Return whether the pool has a page now."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many leading pages the pool has now. Pages without bytes, which stand for
        those of other pools, are hits if those of the other pools are.
        """
        if self._logical:
            return len(keys) if self._side else 0
        direct = bool((self._config.extra_config or {}).get("interface_v1", 0))
        return self._pages.leading(DIRECT if direct else FLAT, keys)

    def clear(self) -> None:
        """Remove all pages of this model and rank, including those of other engines and versions of
        the weights. Their space is reused when needed. Raises ConnectorError if the pool is not
        available; then SGLang reports that it did not clear them.
        """
        self._pages.clear()

    def get_stats(self) -> None:
        """Return nothing: SGLang has no field for these statistics."""

    def close(self) -> None:
        """End the session."""
        if self._identity is not None:
            self._identity.close()
        self._pages.close()

    def _version(self) -> str | None:
        """Return the name of the present weights, or None while they are not known."""
        version = WEIGHTS.version()
        if version is None or self._settings.identity or not version.startswith(UPDATED):
            return version
        return f"{version} of {this_run()}"

    def _restorable(
        self, keys: Sequence[str], requested: Sequence[tuple[str, int]]
    ) -> tuple[list[int], dict[str, int]]:
        """Return :func:`restorable` of pages with KV, and pools with the pages that they need."""
        served = [name for name, _ in requested if name in self._side]
        there = dict(zip(served, self._pages.present(served, keys), strict=True))
        absent = [False] * len(keys)
        return restorable(
            len(keys), [(name, last, there.get(name, absent)) for name, last in requested]
        )

    def _each(
        self, transfers: Sequence[Any], move: Callable[[SidePool, list[str], Any], list[bool]]
    ) -> dict[str, list[bool]]:
        """Move the pages of each pool. Those of a pool that is not registered are not moved."""
        results = {}
        for transfer in transfers:
            side, keys = self._side.get(str(transfer.name)), list(transfer.keys or ())
            moved = None if side is None or transfer.host_indices is None else side
            results[transfer.name] = (
                [False] * len(keys) if moved is None else move(moved, keys, transfer.host_indices)
            )
        return results

    def _buffers(self, keys: Sequence[str], host_indices: Any) -> list[list[Any]]:
        return page_buffers(self.mem_pool_host, host_indices, len(keys))
