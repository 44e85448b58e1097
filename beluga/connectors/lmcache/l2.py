# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The L2 adapter of ``lmcache server`` (MP mode, type "plugin"): the pool below its L1.

Stores and deletes have their own worker, so that loads never wait for them. A namespace consists of
the model, ranks, layer group and salt of LMCache's key. An object's name is the id of its layout,
which is stored in the pool for all processes, and its chunk's hash: the same key with another
layout is another block.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from lmcache import __version__ as lmcache_version
from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from beluga.connectors.connection import Attachment, Connection
from beluga.connectors.identity import Fields, namespace_of
from beluga.connectors.lmcache import objects
from beluga.connectors.lmcache.identity import MODELS_MAX, Models
from beluga.connectors.lmcache.objects import (
    LAYOUTS_MAX,
    Hit,
    Item,
    Layout,
    Layouts,
    bytes_of,
    layout_of,
    layout_of_object,
)
from beluga.connectors.lmcache.worker import ConnectionPins, Ledger, Owed
from beluga.connectors.settings import EngineSettings, settings_of
from beluga.errors import CacheError, QuotaError
from beluga.index import BlockState
from beluga.kvcache import Namespace, OpTicket
from beluga.transfer import TransferClass, TransferStats

logger = init_logger(__name__)
T = TypeVar("T")

NAMESPACES_MAX = 1024  # that are remembered: clients choose their salts


class _Results:
    """Results by task, each returned once, and the file descriptor that signals them."""

    def __init__(self) -> None:
        self.notifier = create_event_notifier()
        self._lock = threading.Lock()
        self._closed = False
        self._done: dict[int, Any] = {}

    def put(self, task: int, result: Any) -> None:
        with self._lock:
            self._done[task] = result
            if not self._closed:
                self.notifier.notify()

    def take(self, task: int) -> Any:
        with self._lock:
            return self._done.pop(task, None)

    def take_all(self) -> dict[int, Any]:
        with self._lock:
            done, self._done = self._done, {}
        return done

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self.notifier.close()


class BelugaL2Adapter(L2AdapterInterface):
    """The pool as LMCache's L2. Every failure is a miss, and a store that fails is skipped.

    ``adapter_params`` are the fields of EngineSettings. Serde (compression) does not work with this
    adapter: the objects that it stores have another layout than those it looks up, so every lookup
    would miss.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        self._settings = settings_of(EngineSettings, params)
        self._stores, self._lookups, self._loads = _Results(), _Results(), _Results()
        self._connection = Connection(
            self._settings, name="lmcache", engine="lmcache", logger=logger
        )
        self._lock = threading.Lock()
        self._task = 0
        self._models = Models(self._settings.identity, logger, outlives=True)
        self._namespace_of = lru_cache(NAMESPACES_MAX)(self._make_namespace)
        self._layouts_of = lru_cache(MODELS_MAX)(self._make_layouts)
        self._pins = ConnectionPins(self._connection)
        self._ledger = Ledger()
        self._owed = Owed()
        self._connection.settle()

    def set_backend_identity(self, name: str, shared: bool = False) -> None:
        """Set how LMCache's events name this adapter: "beluga" instead of "plugin"."""
        super().set_backend_identity("beluga", shared)
        if not shared:
            logger.warning(
                "beluga: the pool is not declared as shared, so LMCache's coordinator counts its "
                'chunks and bytes once for each server; add "shared": true to LMCache\'s L2 adapter'
            )

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> Any:
        """Return a page of the objects that this server has stored, in the order of their names.

        Objects of other servers are not listed: the pool has digests, and not LMCache's keys.
        Evicted ones are listed until the next comparison with the pool. Raises ValueError.
        """
        from lmcache.v1.distributed.api import KeyEntry, KeyListPage

        if page_size < 1:
            raise ValueError(f"page_size is {page_size}; give at least 1")
        names = {repr(key): key for key in self._ledger if model_name in (None, key.model_name)}
        after = (name for name in names if cursor is None or name > cursor)
        page = heapq.nsmallest(page_size + 1, after)
        entries = tuple(
            KeyEntry(names[name].to_encoded_object_key(), self._ledger.size_of(names[name]))
            for name in page[:page_size]
        )
        return KeyListPage(entries, page[page_size - 1] if len(page) > page_size else None)

    def transfer_stats(self) -> dict[TransferClass, TransferStats]:
        """Return what the link scheduler admitted, by class, with the waiting times."""
        return self._connection.transfer_stats()

    def get_store_event_fd(self) -> int:
        """Return a descriptor that becomes readable when stores have ended."""
        return int(self._stores.notifier.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return a descriptor that becomes readable when lookups have ended."""
        return int(self._lookups.notifier.fileno())

    def get_load_event_fd(self) -> int:
        """Return a descriptor that becomes readable when loads have ended."""
        return int(self._loads.notifier.fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store objects. The caller keeps their memory alive until the task has ended."""
        failed = L2StoreResult(False, 0)
        return self._submit(self._stores, failed, self._store, keys, objects, urgent=False)

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Return the L2StoreResult of each store that has ended."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Look up objects and pin those that exist."""
        layouts = {
            group: layout_of(desc.shapes, desc.dtypes) for group, desc in group_layout_descs.items()
        }
        return self._submit(self._lookups, Bitmap(len(keys)), self._lookup, keys, layouts)

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return a Bitmap of the objects that exist, once, or None before the lookup has ended."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Release the pins of a lookup. A lost session has already lost its pins."""
        self._pins.drop(keys)
        self._connection.submit(lambda _: self._pins.release(), urgent=True)

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Fetch objects into the given memory. The memory of an object that fails is undefined."""
        return self._submit(self._loads, Bitmap(len(keys)), self._load, keys, objects)

    def query_load_result(self, task_id: int) -> Any:
        """Return a Bitmap of the fetched objects, once, or None before the load has ended."""
        return self._loads.take(task_id)

    def delete(self, keys: list[Any]) -> None:
        """Remove objects in all their layouts, for all users of the pool, after earlier stores.
        Listeners are called for those that existed.

        If the pool is not available now, the objects miss in this adapter, which removes them and
        calls listeners once the pool is available.
        """
        keys = list(dict.fromkeys(keys))
        if not keys:
            return

        def delete() -> None:
            self._owed.add(keys)  # again, because an earlier store may have settled it
            self._settle()

        self._owed.add(keys)
        self._connection.finish(delete, urgent=False)

    def report_status(self) -> dict[str, Any]:
        """Report the status. "Healthy" means that the adapter responds; without a pool all lookups
        are misses.
        """
        return {
            "is_healthy": True,
            "type": type(self).__name__,
            "attached": self._connection.attached,
            "failure_count": self._connection.failure_count,
        }

    def close(self) -> None:
        """Finish the submitted tasks and end the session. Later tasks fail."""
        self._models.close()
        self._connection.submit(lambda _: self._settle(), urgent=False)
        self._connection.close()
        for results in (self._stores, self._lookups, self._loads):
            results.close()

    def _submit(
        self,
        results: _Results,
        failed: T,
        call: Callable[..., T | None],
        *arguments: Any,
        urgent: bool = True,
    ) -> int:
        """Submit ``call`` and return the task's number. The task always completes."""
        with self._lock:
            self._task += 1
            task = self._task
        if urgent and self._owed:  # a store settles these deletions itself
            self._connection.submit(lambda _: self._settle(), urgent=False)
        ticket = self._connection.submit(lambda _: call(*arguments), urgent=urgent)

        def end(ended: OpTicket[T | None]) -> None:
            results.put(task, failed if ended.result is None else ended.result)

        ticket.then(end)
        return task

    def _namespace(self, key: Any) -> Namespace:
        """Return the namespace of the objects of an LMCache key, in all layouts."""
        weights = self._models.last(key.model_name)  # "": there are no stored objects
        return self._namespace_of(
            key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, weights
        )

    def _make_namespace(
        self, model: str, kv_rank: int, object_group: int, salt: str, weights: str
    ) -> Namespace:
        fields: Fields = {
            "form": "L2",
            "model": model,
            "kv_rank": kv_rank,
            "object_group": object_group,
            "cache_salt": salt,
            "weights": weights,
        }
        return namespace_of(self._settings, "lmcache", lmcache_version, fields)

    def _make_layouts(self, model: str) -> Layouts:
        fields: Fields = {"form": "L2 layouts", "model": model}
        return Layouts(namespace_of(self._settings, "lmcache", lmcache_version, fields))

    def _item(self, key: Any, layout_id: bytes) -> Item:
        """Return the namespace and the name of an object."""
        return self._namespace(key), layout_id + key.chunk_hash

    def _items(
        self, attachment: Attachment, keys: Sequence[Any], layouts: Sequence[Layout], *, add: bool
    ) -> list[Item | None]:
        """Return the item of each key in its layout, or None if the layout has no id."""
        wanted: dict[str, set[Layout]] = {}
        for key, layout in zip(keys, layouts, strict=True):
            wanted.setdefault(key.model_name, set()).add(layout)
        ids = {
            model: self._layouts_of(model).ids_of(attachment, layouts_of_model, add=add)
            for model, layouts_of_model in wanted.items()
        }
        pairs = zip(keys, layouts, strict=True)
        layout_ids = [(key, ids[key.model_name].get(layout)) for key, layout in pairs]
        return [
            None if layout_id is None else self._item(key, layout_id)
            for key, layout_id in layout_ids
        ]

    def _store(self, keys: list[Any], memories: list[Any]) -> Any:
        if not all(self._models.digest(key.model_name) for key in keys):
            return None
        if not self._settle():
            return None
        layouts = [layout_of_object(memory) for memory in memories]

        def store(attachment: Attachment) -> list[BlockState]:
            items = self._items(attachment, keys, layouts, add=True)
            states = [BlockState.REFUSED] * len(items)
            placed = [(i, item) for i, item in enumerate(items) if item is not None]
            if len(placed) < len(items):
                logger.warning(
                    "beluga: the pool has objects of this model in %d layouts, and stores no "
                    "more; give each kind of engine its own `variant`",
                    LAYOUTS_MAX,
                )
            done = objects.store(
                attachment,
                [item for _, item in placed],
                [bytes_of(memories[i]) for i, _ in placed],
            )
            for (i, _), state in zip(placed, done, strict=True):
                states[i] = state
            return states

        states = self._connection.attempt("storing", store)
        if states is None:
            return None
        sizes = [m.get_size() for m in memories]
        new = [i for i, state in enumerate(states) if state == BlockState.GRANTED]
        self._stored([keys[i] for i in new], [sizes[i] for i in new])
        if self._ledger.grown:
            self._connection.attempt("looking for evicted objects", self._note_evictions)
        return L2StoreResult(BlockState.REFUSED not in states, sum(sizes[i] for i in new))

    def _stored(self, keys: list[Any], sizes: list[int]) -> None:
        """Record new objects, and call the listeners."""
        if not keys:
            return
        self._removed([key for key in keys if key in self._ledger])  # the keys were evicted
        self._ledger.add(keys, sizes)
        self._notify_keys_stored(keys, sizes)

    def _removed(self, keys: list[Any]) -> None:
        """Record that objects are no longer in the pool, and call the listeners."""
        if keys:
            self._notify_keys_deleted(keys, self._ledger.take(keys))

    def _note_evictions(self, attachment: Attachment) -> None:
        """Drop objects from the ledger that neither the pool nor a lower tier has."""
        keys = list(self._ledger)
        there = self._existing(attachment, keys)
        self._removed([key for key in keys if key not in there])
        self._ledger.checked()

    def _existing(self, attachment: Attachment, keys: Sequence[Any]) -> set[Any]:
        """Return the keys whose objects the pool or a lower tier has in any layout."""
        ids = self._all_ids(attachment, keys)
        candidates = [
            (key, self._item(key, identifier)) for key in keys for identifier in ids[key.model_name]
        ]
        there = objects.exist(attachment, [item for _, item in candidates])
        return {key for (key, _), exists in zip(candidates, there, strict=True) if exists}

    def _settle(self) -> bool:
        """Execute pending deletions, on the stores' worker. Returns whether none is pending
        now.
        """
        if not self._owed:
            return True
        keys, models = self._owed.all()
        if any(self._models.pending(name) for name in {key.model_name for key in keys}):
            return False

        def remove(attachment: Attachment) -> set[Any]:
            for model in models:
                self._layouts_of(model).forget(attachment)
            there = self._existing(attachment, keys)
            ids = self._all_ids(attachment, keys)
            objects.remove(
                attachment,
                [self._item(key, identifier) for key in keys for identifier in ids[key.model_name]],
            )
            return there

        there = self._connection.attempt("deleting", remove)
        if there is None:
            return False
        self._owed.done(keys, models)
        everything = [key for key in self._ledger if key.model_name in models]
        removed = [key for key in keys if key in there or key in self._ledger]
        self._removed(list(dict.fromkeys(everything + removed)))
        return True

    def _lookup(self, keys: list[Any], layouts: dict[int, Layout]) -> Any:
        self._pins.release()

        def find(attachment: Attachment) -> dict[int, Hit]:
            hits: dict[int, Hit] = {}
            tries = self._tries(attachment, keys, layouts)
            try:
                for depth in range(max(map(len, tries), default=0)):
                    untried = [
                        i for i in range(len(keys)) if depth < len(tries[i]) and i not in hits
                    ]
                    items = [tries[i][depth] for i in untried]
                    results = zip(untried, objects.find(attachment, items, pin=True), strict=True)
                    hits |= {i: hit for i, hit in results if hit is not None}
            except (CacheError, QuotaError):  # the session continues, and so do its pins
                pinned = [hit.grant for hit in hits.values() if hit.pinned]
                objects.release(attachment, pinned)
                raise
            for i, hit in hits.items():
                self._pins.hold(keys[i], attachment, hit)
            return hits

        hits = self._connection.attempt("looking up", find)
        if hits is None:
            return None
        bitmap = Bitmap(len(keys))
        for i in hits:
            bitmap.set(i)
        return bitmap

    def _tries(
        self, attachment: Attachment, keys: Sequence[Any], layouts: dict[int, Layout]
    ) -> list[list[Item]]:
        """Return the possible layouts of each key's object: the described layout of its group, or
        all layouts of the model in the pool.
        """
        tries: list[list[Item]] = [[] for _ in keys]
        loadable = [i for i, key in enumerate(keys) if self._may_load(key)]
        described = [i for i in loadable if layouts.get(keys[i].object_group_id)]
        items = self._items(
            attachment,
            [keys[i] for i in described],
            [layouts[keys[i].object_group_id] for i in described],
            add=False,
        )
        for i, item in zip(described, items, strict=True):
            tries[i] = [] if item is None else [item]
        undescribed = sorted(set(loadable) - set(described))
        ids = self._all_ids(attachment, [keys[i] for i in undescribed])
        for i in undescribed:
            tries[i] = [self._item(keys[i], identifier) for identifier in ids[keys[i].model_name]]
        return tries

    def _may_load(self, key: Any) -> bool:
        """Return whether an object may be found: its model's files are those that were identified,
        and no deletion is pending.
        """
        return key not in self._owed and bool(self._models.digest(key.model_name))

    def _all_ids(self, attachment: Attachment, keys: Sequence[Any]) -> dict[str, list[bytes]]:
        """Return the ids of all layouts of each model."""
        models = dict.fromkeys(key.model_name for key in keys)
        return {model: self._layouts_of(model).ids(attachment) for model in models}

    def _load(self, keys: list[Any], memories: list[Any]) -> Any:
        layouts = [layout_of_object(memory) for memory in memories]

        def load(attachment: Attachment) -> list[int]:
            items = self._items(attachment, keys, layouts, add=False)
            named = [
                (i, item)
                for i, item in enumerate(items)
                if item is not None and self._may_load(keys[i])
            ]
            done = objects.load(
                attachment, [item for _, item in named], [bytes_of(memories[i]) for i, _ in named]
            )
            return [i for (i, _), loaded in zip(named, done, strict=True) if loaded]

        done = self._connection.attempt("loading", load)
        if done is None:
            return None
        bitmap = Bitmap(len(keys))
        for i in done:
            bitmap.set(i)
        if done:
            self._notify_keys_accessed([keys[i] for i in done])
        return bitmap
