# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The storage plugin of LMCache inside an engine (``storage_plugins``): whole chunks in the pool.

The number of tokens of a chunk follows from its length, so the shorter last chunk of a request is
returned as it was stored. The namespace has the rest of the layout. Names start with the model's
generation, so that all chunks can be cleared.
"""

from __future__ import annotations

import asyncio
import collections
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from lmcache import __version__ as lmcache_version
from lmcache.logging import init_logger
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from beluga.connectors.connection import Attachment, Connection
from beluga.connectors.hints import NAME, NO_HINT, HintReader, RequestHint
from beluga.connectors.identity import Fields, digest_of, namespace_of
from beluga.connectors.lmcache import objects
from beluga.connectors.lmcache.identity import Models
from beluga.connectors.lmcache.objects import Hit, Item, bytes_of, layout_of
from beluga.connectors.lmcache.worker import ConnectionPins
from beluga.connectors.records import CacheGeneration
from beluga.connectors.settings import EngineSettings, settings_of
from beluga.errors import ConnectorError
from beluga.index import BlockState
from beluga.kvcache import Namespace, OpTicket
from beluga.transfer import TransferClass, TransferStats

logger = init_logger(__name__)
T = TypeVar("T")

PREFIX = "beluga."  # prefix of our settings in LMCache's extra_config
HINT = f"lmcache.{NAME}"  # LMCache passes on only the fields of kv_transfer_params with this prefix


class BelugaBackend(StoragePluginInterface):
    """The pool as a storage backend. Every failure is a miss, and a put that fails is skipped.

    The settings are the fields of EngineSettings, as ``beluga.NAME`` in ``extra_config``. Raises
    ConnectorError for layer-wise storing and outside of a worker; LMCache then continues without
    this backend.
    """

    def __init__(
        self,
        dst_device: str = "cpu",
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: Any = None,
    ) -> None:
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        if config is None or metadata is None or local_cpu_backend is None:
            raise ConnectorError(
                "beluga's storage plugin needs a worker's memory (local_cpu); enable it"
            )
        if config.use_layerwise:
            raise ConnectorError(
                "beluga's storage plugin stores whole chunks; disable layer-wise storing"
            )
        extra = (config.extra_config or {}).items()
        given = {name.removeprefix(PREFIX): v for name, v in extra if name.startswith(PREFIX)}
        self._settings = settings_of(EngineSettings, given)
        self._format = MemoryFormat.KV_MLA_FMT if metadata.use_mla else MemoryFormat.KV_2LTD
        self._namespaces: dict[Any, Namespace] = {}
        self._model = model = str(getattr(metadata, "model_name", ""))
        self._models = Models(self._settings.identity, logger)
        self._models.check(model)
        self._metadata = digest_of(metadata, path="metadata", identity=self._settings.identity)
        fields: Fields = {"form": "plugin's era", "model": model}
        self._generation = CacheGeneration(
            namespace_of(self._settings, "lmcache", lmcache_version, fields)
        )
        self._storing: collections.Counter[Any] = collections.Counter()  # puts by key
        self._lock = threading.Lock()
        self._hints = HintReader(logger)
        self._connection = Connection(
            self._settings, name="lmcache", engine="lmcache", logger=logger
        )
        self._pins = ConnectionPins(self._connection)
        self._connection.settle()

    @property
    def attached(self) -> bool:
        """Whether the pool is available now. This may change at any time."""
        return self._connection.attached

    def transfer_stats(self) -> dict[TransferClass, TransferStats]:
        """Return the admissions of the host's link, by class, with their waiting times."""
        return self._connection.transfer_stats()

    def contains(self, key: Any, pin: bool = False) -> bool:
        """Return whether the pool has a chunk now. With ``pin`` it is pinned until :meth:`unpin`,
        if the session's quota of pins allows it.
        """
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: list[Any], pin: bool = False) -> int:
        """Return how many leading chunks the pool has. With ``pin`` they are pinned until
        :meth:`unpin`, if the session's quota of pins allows it.
        """

        def find(attachment: Attachment) -> int:
            results = objects.find(attachment, self._items(attachment, keys), pin=pin)
            hits = results.index(None) if None in results else len(results)
            behind = [hit.grant for hit in results[hits:] if hit is not None and hit.pinned]
            if behind:
                objects.release(attachment, behind)
            for key, hit in zip(keys[:hits], results[:hits], strict=True):
                if hit is not None:
                    self._pins.hold(key, attachment, hit)
            return hits

        self._pins.release()
        return self._connection.attempt("looking up", find) or 0

    async def batched_async_contains(
        self, lookup_id: str, keys: list[Any], pin: bool = False
    ) -> int:
        """Like :meth:`batched_contains`, but off the event loop."""
        return await asyncio.to_thread(self.batched_contains, keys, pin)

    def exists_in_put_tasks(self, key: Any) -> bool:
        """Return whether a chunk is being stored."""
        with self._lock:
            return self._storing[key] > 0

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> None:
        """Store chunks in the background. Their memory is kept until then. The callback is called
        for each chunk that the pool has afterwards. After :meth:`close` nothing is stored.
        """
        keys = list(keys)
        with self._lock:
            self._storing.update(keys)
        for memory in objs:
            memory.ref_count_up()

        def end(ticket: OpTicket[list[Any]]) -> None:
            with self._lock:
                self._storing.subtract(keys)
                self._storing = +self._storing  # drops zeros
            for memory in objs:
                memory.ref_count_down()
            if on_complete_callback is not None:
                for key in ticket.result or ():
                    _call(on_complete_callback, key)

        self._connection.submit(lambda _: self._put(keys, objs), urgent=False).then(end)

    def get_blocking(self, key: Any) -> Any:
        """Return a chunk in LMCache's memory, or None."""
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[Any]) -> list[Any]:
        """Return chunks in LMCache's memory, with None for each that the pool no longer has."""
        chunks = self._connection.attempt("loading", lambda a: self._get(a, keys))
        chunks = chunks or [None] * len(keys)
        if (hint := self._hint(keys).for_hits()) is not None:
            there = [key for key, memory in zip(keys, chunks, strict=True) if memory is not None]
            self._connection.submit(lambda _: self._give(there, hint), urgent=False)
        return chunks

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[Any], transfer_spec: Any = None
    ) -> list[Any]:
        """Return the leading chunks that the pool has, off the event loop."""
        chunks = await asyncio.to_thread(self.batched_get_blocking, keys)
        hits = chunks.index(None) if None in chunks else len(chunks)
        for memory in chunks[hits:]:
            if memory is not None:
                memory.ref_count_down()
        return chunks[:hits]

    def pin(self, key: Any) -> bool:
        """Pin a chunk until :meth:`unpin`, or for PIN_S seconds. Returns False if the pool does not
        have it, or the session's quota of pins is used up.
        """

        def find(attachment: Attachment) -> bool:
            (hit,) = objects.find(attachment, self._items(attachment, [key]), pin=True)
            if hit is None or not hit.pinned:
                return False
            self._pins.hold(key, attachment, hit)
            return True

        self._pins.release()
        return self._connection.attempt("pinning", find) or False

    def unpin(self, key: Any) -> bool:
        """Release a pin of a chunk, if it has one. Returns False if the pool does not have the
        chunk, as LMCache's own backends do.
        """
        dropped = self._pins.drop([key])
        self._pins.release()
        return bool(dropped) or self.contains(key)

    def remove(self, key: Any, force: bool = True) -> bool:
        """Remove a chunk for all users. Returns whether it existed."""
        return self.batched_remove([key], force) == 1

    def batched_remove(self, keys: list[Any], force: bool = True) -> int:
        """Remove chunks for all users. Returns how many existed. A chunk that this backend is
        storing is removed afterwards.
        """
        keys = list(dict.fromkeys(keys))

        def remove() -> int | None:
            return self._connection.attempt(
                "removing", lambda a: objects.remove(a, self._items(a, keys))
            )

        stores = any(map(self.exists_in_put_tasks, keys))
        return (self._connection.finish(remove, urgent=False) if stores else remove()) or 0

    def clear(self) -> int:
        """Remove all chunks of this model for all users, and return 0. If the pool is not available
        now, this engine finds no chunk until they are removed. LMCache sums up tokens, which this
        backend does not count.
        """
        self._generation.clear()
        self._connection.attempt("clearing", self._generation.now)
        if self._generation.pending:
            logger.error(
                "beluga: the chunks are not cleared, because the pool is not available; this "
                "engine clears them before it uses the pool again"
            )
        return 0

    def get_allocator_backend(self) -> Any:
        """Return the backend whose memory takes chunks that are read."""
        return self.local_cpu_backend

    def touch_cache(self) -> None:
        """Do nothing: a lookup has already touched the chunks."""

    def close(self) -> None:
        """Finish the submitted tasks and end the session."""
        self._models.close()
        self._connection.close()

    def _items(self, attachment: Attachment, keys: Sequence[Any]) -> list[Item]:
        """Return namespaces and names. A chunk's name is LMCache's text of its key, with model,
        ranks, dtype and tags.
        """
        layout = layout_of(self.metadata.get_shapes(), self.metadata.get_dtypes())
        weights = self._models.digest(self._model)  # "": there are no stored chunks
        namespace = self._namespaces.get((weights, layout))
        # Layer groups are known only after the engine has registered its tensors.
        if namespace is None:
            fields: Fields = {
                "form": "plugin",
                "layout": repr(layout),
                "chunk_tokens": self.metadata.chunk_size,
                "mla": int(self.metadata.use_mla),
                "weights": weights,
                "metadata": self._metadata,
            }
            namespace = namespace_of(self._settings, "lmcache", lmcache_version, fields)
            self._namespaces[weights, layout] = namespace
        generation = self._generation.now(attachment)
        return [(namespace, generation + key.to_string().encode()) for key in keys]

    def _token_size(self) -> int:
        """Return the bytes of one token in all layers."""
        pairs = zip(self.metadata.get_shapes(1), self.metadata.get_dtypes(), strict=True)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in pairs)

    def _put(self, keys: Sequence[Any], memories: list[Any]) -> list[Any]:
        """Store the chunks that have the format of a get. Returns the keys that the pool now
        has.
        """
        if not self._models.digest(self._model):
            return []
        pairs = zip(keys, memories, strict=True)
        fit = [
            (key, memory)
            for key, memory in pairs
            if memory.get_memory_format() == self._format
            and memory.get_size() % self._token_size() == 0
        ]

        def store(attachment: Attachment) -> list[BlockState]:
            items = self._items(attachment, [key for key, _ in fit])
            return objects.store(attachment, items, [bytes_of(memory) for _, memory in fit])

        states = self._connection.attempt("storing", store) or []
        named = [(key, state) for (key, _), state in zip(fit, states, strict=False)]
        new = [key for key, state in named if state == BlockState.GRANTED]
        present = [key for key, state in named if state == BlockState.HIT]
        hint = self._hint(keys)
        self._give(new, hint.for_own())
        self._give(present, hint.for_hits())
        return [key for key, state in named if state in (BlockState.GRANTED, BlockState.HIT)]

    def _hint(self, keys: Sequence[Any]) -> RequestHint:
        """Return the hint of the request that all keys of a batch belong to. A malformed one is
        ignored.
        """
        configs = getattr(keys[0], "request_configs", None) if keys else None
        given = configs.get(HINT) if isinstance(configs, Mapping) else None
        return NO_HINT if given is None else self._hints.read(given) or NO_HINT

    def _give(self, keys: list[Any], hint: RequestHint | None) -> None:
        """Give a request's hint to chunks in the pool, if there is one."""
        if keys and hint is not None:
            self._connection.attempt(
                "giving hints", lambda a: objects.hint(a, self._items(a, keys), hint)
            )

    def _allocate(self, hit: Hit | None) -> Any:
        """Allocate memory for a chunk of the stored length. Returns None if that is impossible."""
        size = self._token_size()
        if hit is None or hit.grant.length % size != 0:
            return None
        tokens = hit.grant.length // size
        if tokens > self.metadata.chunk_size:
            return None
        shapes, dtypes = self.metadata.get_shapes(tokens), self.metadata.get_dtypes()
        return self.local_cpu_backend.allocate(shapes, dtypes, self._format, busy_loop=False)

    def _get(self, attachment: Attachment, keys: list[Any]) -> list[Any]:
        items = self._items(attachment, keys)
        hits = objects.find(attachment, items, pin=False)
        memories = [self._allocate(hit) for hit in hits]
        there = [i for i, memory in enumerate(memories) if memory is not None]
        done: list[bool] = []
        try:
            targets = [bytes_of(memories[i]) for i in there]
            done = objects.load(attachment, [items[i] for i in there], targets)
        finally:
            for at, i in enumerate(there):
                if at >= len(done) or not done[at]:
                    memories[i].ref_count_down()
                    memories[i] = None
        if getattr(self.metadata, "worker_id", 0) == 0:  # all ranks load the same tokens
            loaded = (hits[i] for at, i in enumerate(there) if done[at])
            size = sum(hit.grant.length for hit in loaded if hit is not None)
            attachment.client.report.saved(size // self._token_size())
        return memories


def _call(callback: Callable[[Any], None], key: Any) -> None:
    try:
        callback(key)
    except Exception:
        logger.exception("LMCache's callback for a stored chunk failed")
