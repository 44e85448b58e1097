# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The HiCacheStorage that SGLang loads by name (``--hicache-storage-backend dynamic``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.version import __version__ as sglang_version

from beluga.connectors.naming import EngineSettings
from beluga.connectors.settings import settings_of
from beluga.connectors.sglang.pages import DIRECT, FLAT, Pages, page_buffers, pool_namespace
from beluga.connectors.sglang.weights import WEIGHTS, check_release, model_fields
from beluga.errors import ConnectorError
from beluga.transfer import Carried, TransferClass

_SGLANGS = ("backend_name", "module_path", "class_name", "interface_v1")  # not settings of ours


class BelugaHiCache(HiCacheStorage):
    """The pool as HiCache's L3; whatever fails is a miss, a page that cannot be put is left out.

    With ``interface_v1`` pages move straight between the pool and SGLang's host memory; without,
    SGLang copies each once more. Settings are the fields of EngineSettings, in SGLang's extra
    config. Models with several pools (hybrid attention, Mamba) are refused with ConnectorError, and
    releases whose keys do not tell LoRA adapters apart.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        check_release(sglang_version)
        WEIGHTS.watch()
        given = dict(storage_config.extra_config or {})
        self._config = storage_config
        self._settings = settings_of(
            EngineSettings, {name: given[name] for name in given if name not in _SGLANGS}
        )
        self._pages = Pages(self._settings, WEIGHTS.version)

    @property
    def attached(self) -> bool:
        """Whether the pool is there now; it comes and goes."""
        return self._pages.attached

    @property
    def failure_count(self) -> int:
        """Calls of the pool that failed, and were misses for it."""
        return self._pages.failure_count

    def carried(self) -> dict[TransferClass, Carried]:
        """What the host's link to the pool let on, by class, and how long it waited for that."""
        return self._pages.carried()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn where SGLang's pages lie, and so which bytes they have."""
        self._pages.register(
            pool_namespace(
                self._settings, sglang_version, self._config, mem_pool_host, model_fields()
            )
        )
        super().register_mem_pool_host(mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuse a pool beside the KV's own."""
        if str(host_pool_name) != "kv":
            raise ConnectorError(f"beluga stores KV pages only, not SGLang's pool {host_pool_name}")
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Fetch pages to where they lie in the host pool."""
        hits = self._pages.fetch(DIRECT, keys, lambda: self._buffers(keys, host_indices))
        return [i < hits for i in range(len(keys))]

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Put pages from where they lie in the host pool."""
        return self._pages.store(DIRECT, keys, lambda: self._buffers(keys, host_indices))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Fetch one page into a flat tensor: the tensor, or None."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Fetch pages into flat tensors: of the leading ones that the pool has, the tensor."""
        targets = list(target_locations or [])
        if len(targets) != len(keys) or any(target is None for target in targets):
            return [None] * len(keys)
        hits = self._pages.fetch(FLAT, keys, lambda: targets)
        return [target if i < hits else None for i, target in enumerate(targets)]

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Put one page, a flat tensor."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Put pages, flat tensors: whether the pool has all of them now."""
        sources = list(values or [])
        if len(sources) != len(keys) or any(source is None for source in sources):
            return False
        return all(
            self._pages.store(FLAT, keys, lambda: [source.contiguous() for source in sources])
        )

    def exists(self, key: str) -> bool:
        """Whether the pool has a page now."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages the pool has now."""
        direct = bool((self._config.extra_config or {}).get("interface_v1", 0))
        return self._pages.leading(DIRECT if direct else FLAT, keys)

    def clear(self) -> None:
        """Forget all pages of this model and rank, also those of other engines and versions of the
        weights. Their room is taken when it is needed."""
        self._pages.clear()

    def get_stats(self) -> None:
        """Nothing that SGLang has a place for."""

    def close(self) -> None:
        """Give the sessions back."""
        self._pages.close()

    def _buffers(self, keys: Sequence[str], host_indices: Any) -> list[list[Any]]:
        return page_buffers(self.mem_pool_host, host_indices, len(keys))
