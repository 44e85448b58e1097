# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The L2 adapter of ``lmcache server`` (MP mode, type "plugin"): the pool behind its L1.

Stores have their own thread and session, so that no load waits behind one. A namespace consists of
what LMCache's key contains (model, ranks, layer group, salt) and of the shapes and dtypes of the
objects: the same key with another layout is another block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lmcache import __version__ as lmcache_version
from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from beluga.connectors.connection import Attachment
from beluga.connectors.lmcache import objects
from beluga.connectors.lmcache.objects import Item, Layout, bytes_of, layout_of
from beluga.connectors.lmcache.worker import Worker
from beluga.connectors.naming import EngineSettings, namespace_of
from beluga.connectors.settings import settings_of
from beluga.kvcache import Namespace
from beluga.meta import BlockState, Grant
from beluga.transfer import TransferClass, TransferStats

logger = init_logger(__name__)
T = TypeVar("T")


class _Results:
    """Results by task, which are taken once each, and the file descriptor that signals them."""

    def __init__(self) -> None:
        self.notifier = create_event_notifier()
        self._lock = threading.Lock()
        self._done: dict[int, Any] = {}

    def put(self, task: int, result: Any) -> None:
        with self._lock:
            self._done[task] = result
        self.notifier.notify()

    def take(self, task: int) -> Any:
        with self._lock:
            return self._done.pop(task, None)

    def take_all(self) -> dict[int, Any]:
        with self._lock:
            done, self._done = self._done, {}
        return done


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
        self._writer = Worker(self._settings, name="lmcache-store", logger=logger)
        self._reader = Worker(self._settings, name="lmcache-load", logger=logger)
        self._lock = threading.Lock()
        self._task = 0
        self._namespaces: dict[tuple[Any, ...], Namespace] = {}
        # the layout last seen for each rank and group
        self._layouts: dict[tuple[str, int, int], Layout] = {}
        # used by the reader's thread only
        self._pins: dict[Any, list[tuple[Attachment, Grant]]] = {}
        self._reader.connection.settle()
        self._writer.connection.settle()

    def carried(self) -> dict[TransferClass, TransferStats]:
        """Return what the host's link to the pool admitted, by class, and how long pieces
        waited.
        """
        read, written = self._reader.connection.carried(), self._writer.connection.carried()
        return {kind: read[kind].plus(written[kind]) for kind in TransferClass}

    def get_store_event_fd(self) -> int:
        """Return a descriptor that is readable when stores have ended."""
        return int(self._stores.notifier.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return a descriptor that is readable when lookups have ended."""
        return int(self._lookups.notifier.fileno())

    def get_load_event_fd(self) -> int:
        """Return a descriptor that is readable when loads have ended."""
        return int(self._loads.notifier.fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store objects. The caller keeps their memory until the task has ended."""
        return self._submit(
            self._writer, self._stores, L2StoreResult(False, 0), self._store, keys, objects
        )

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Return the L2StoreResult of each store that has ended."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Look objects up and pin those that exist."""
        layouts = {
            group: layout_of(desc.shapes, desc.dtypes) for group, desc in group_layout_descs.items()
        }
        return self._submit(
            self._reader, self._lookups, Bitmap(len(keys)), self._lookup, keys, layouts
        )

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return a Bitmap of the objects that exist, once, or None before the lookup has ended."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Drop the pins of a lookup. A lost session has already lost its pins."""
        self._reader.submit(lambda _: self._unlock(keys))

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Fetch objects into the given memory. The memory of an object that fails is undefined."""
        return self._submit(self._reader, self._loads, Bitmap(len(keys)), self._load, keys, objects)

    def query_load_result(self, task_id: int) -> Any:
        """Return a Bitmap of the fetched objects, once, or None before the load has ended."""
        return self._loads.take(task_id)

    def delete(self, keys: list[Any]) -> None:
        """Remove objects whose layouts this adapter has seen."""
        self._writer.submit(lambda connection: self._delete(connection, keys))

    def report_status(self) -> dict[str, Any]:
        """Report the status. "Healthy" means that the adapter answers; without a pool it answers
        misses.
        """
        connections = (self._reader.connection, self._writer.connection)
        return {
            "is_healthy": True,
            "type": type(self).__name__,
            "attached": all(connection.attached for connection in connections),
            "failure_count": sum(connection.failure_count for connection in connections),
        }

    def close(self) -> None:
        """Finish the submitted tasks and end both sessions."""
        self._writer.close()
        self._reader.close()
        for results in (self._stores, self._lookups, self._loads):
            results.notifier.close()

    def _submit(
        self,
        worker: Worker,
        results: _Results,
        failed: T,
        call: Callable[..., T | None],
        *arguments: Any,
    ) -> int:
        """Submit ``call`` to a worker and return the task's number. The task always ends."""
        with self._lock:
            self._task += 1
            task = self._task

        def job(connection: Any) -> None:
            result = None
            try:
                result = call(connection, *arguments)
            finally:
                results.put(task, failed if result is None else result)

        worker.submit(job)
        return task

    def _item(self, key: Any, layout: Layout) -> Item:
        """Return the namespace and the name of the object of an LMCache key."""
        owner = (key.model_name, key.kv_rank, key.object_group_id)
        whose = (*owner, key.cache_salt, layout)
        namespace = self._namespaces.get(whose)
        if namespace is None:
            self._layouts[owner] = layout
            fields = {
                "form": "L2",
                "model": key.model_name,
                "kv_rank": key.kv_rank,
                "object_group": key.object_group_id,
                "cache_salt": key.cache_salt,
                "layout": repr(layout),
            }
            namespace = namespace_of(self._settings, "lmcache", lmcache_version, fields)
            self._namespaces[whose] = namespace
        return namespace, key.chunk_hash

    def _items(self, keys: list[Any], memories: list[Any]) -> list[Item]:
        pairs = zip(keys, memories, strict=True)
        return [self._item(key, layout_of(m.get_shapes(), m.get_dtypes())) for key, m in pairs]

    def _store(self, connection: Any, keys: list[Any], memories: list[Any]) -> Any:
        items = self._items(keys, memories)
        states = connection.attempt(
            "storing",
            lambda attachment: objects.store(attachment, items, [bytes_of(m) for m in memories]),
        )
        if states is None:
            return None
        sizes = [m.get_size() for m in memories]
        new = [i for i, state in enumerate(states) if state == BlockState.GRANTED]
        if new:
            self._notify_keys_stored([keys[i] for i in new], [sizes[i] for i in new])
        return L2StoreResult(BlockState.REFUSED not in states, sum(sizes[i] for i in new))

    def _lookup(self, connection: Any, keys: list[Any], layouts: dict[int, Layout]) -> Any:
        known = [i for i, key in enumerate(keys) if key.object_group_id in layouts]
        items = [self._item(keys[i], layouts[keys[i].object_group_id]) for i in known]

        def find(attachment: Attachment) -> tuple[Attachment, list[Grant | None]]:
            return attachment, objects.find(attachment, items, pin=True)

        answer = connection.attempt("looking up", find)
        if answer is None:
            return None
        attachment, found = answer
        bitmap = Bitmap(len(keys))
        for i, grant in zip(known, found, strict=True):
            if grant is not None:
                bitmap.set(i)
                self._pins.setdefault(keys[i], []).append((attachment, grant))
        return bitmap

    def _unlock(self, keys: list[Any]) -> None:
        connection = self._reader.connection
        held: list[tuple[Attachment, Grant]] = []
        for key in keys:
            pins = self._pins.get(key)
            if pins:
                held.append(pins.pop())
                if not pins:
                    del self._pins[key]

        def release(attachment: Attachment) -> int:
            return objects.release(
                attachment, [grant for owner, grant in held if owner is attachment]
            )

        connection.attempt("unlocking", release)

    def _load(self, connection: Any, keys: list[Any], memories: list[Any]) -> Any:
        items = self._items(keys, memories)
        done = connection.attempt(
            "loading",
            lambda attachment: objects.load(attachment, items, [bytes_of(m) for m in memories]),
        )
        if done is None:
            return None
        bitmap = Bitmap(len(keys))
        for i, loaded in enumerate(done):
            if loaded:
                bitmap.set(i)
        self._notify_keys_accessed([key for key, loaded in zip(keys, done, strict=True) if loaded])
        return bitmap

    def _delete(self, connection: Any, keys: list[Any]) -> None:
        seen = [k for k in keys if (k.model_name, k.kv_rank, k.object_group_id) in self._layouts]
        layouts = [self._layouts[k.model_name, k.kv_rank, k.object_group_id] for k in seen]
        items = [self._item(key, layout) for key, layout in zip(seen, layouts, strict=True)]
        connection.attempt("deleting", lambda attachment: objects.remove(attachment, items))
