# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Updates of the weights in a running engine, and the generation of its blocks.

vLLM's connectors are not notified of ``update_weights``, ``reload_weights``, ``sleep`` at level 2,
or a method that a trainer calls in the workers. All of them go through ``collective_rpc`` of the
executor in the scheduler's process, so this is observed: a call of any method that is not known to
preserve the weights counts as an update.

After an update the engine's blocks are its own: no other engine's blocks are found and no other
engine finds these, until ``set_weight_version`` names the weights (``POST /finish_weight_update``
with a ``weight_version``). Engines of one training that were updated to one version share blocks
again. vLLM's own
prefix cache may still have blocks of the old weights. If it has any at an update, the pool is
neither read nor written until that cache is reset.

Two trainings may give one version to different weights, so a version names weights only together
with the operator's setting ``identity``. Without it, updated engines do not share blocks.
"""

from __future__ import annotations

import functools
import hashlib
import os
import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterator

    from beluga.connectors.vllm.lookups import Lookups
    from beluga.connectors.vllm.schedule import Schedule

# Methods of vLLM's workers that leave the weights as they are.
HARMLESS = frozenset(
    {
        *("execute_model", "sample_tokens", "execute_dummy_batch", "take_draft_token_ids"),
        *("synchronize_device", "check_health", "profile", "shutdown", "init_device"),
        *("init_worker", "adjust_rank", "load_model"),  # before there are blocks
        *("determine_available_memory", "get_kv_cache_spec", "get_supported_kv_cache_layouts"),
        *("set_kv_cache_layout", "initialize_from_config", "initialize_cache"),
        *("compile_or_warm_up_model", "update_max_model_len", "get_supported_tasks"),
        *("get_kv_connector_handshake_metadata", "get_model_inspection", "get_cache_block_size"),
        *("supports_worker_kv_init", "reset_mm_cache", "reset_encoder_cache"),
        *("list_loras", "pin_lora", "compute_weight_checksums", "wake_up"),
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine"),
        *("save_sharded_state", "save_tensorized_model"),
    }
)


class UpdateListener(Protocol):
    """Receives notifications of an engine's updates."""

    instance_id: str

    def updated(self, method: str) -> None:
        """The weights may have changed, by this method of the workers."""

    def named(self, version: str) -> None:
        """The weights have this version from now on."""

    def flushed(self, manager: Any) -> None:
        """The engine's own prefix cache (vLLM's manager of it) is empty."""

    def adapter_loads(self, lora: Any) -> None:
        """The workers are about to load an adapter."""

    def adapter_loaded(self, lora: Any) -> None:
        """The workers have loaded an adapter."""

    def adapter_removed(self, number: int) -> None:
        """The workers no longer have an adapter."""


class WeightsGeneration:
    """The generation of an engine's weights, which is part of the names of its blocks.

    It is empty as long as the weights are those that the engine has loaded. ``known`` is false
    while vLLM's own cache has blocks of former weights. ``identified``: the operator's ``identity``
    names a training, in which a version has one meaning.
    """

    def __init__(self, logger: logging.Logger, *, identified: bool = False) -> None:
        self.name = b""
        self._identified = identified
        self.known = True
        self._updated = False
        self._logger = logger

    def reset(self) -> None:
        """Separate the engine's blocks from all others."""
        self.name = os.urandom(32)

    def updated(self, method: str, *, clean: bool) -> None:
        """Start a generation of new weights. ``clean``: vLLM's own cache is empty."""
        self._updated, self.known = True, clean
        self.reset()
        if not clean:
            self._logger.warning(
                "beluga: the weights may have changed (%s) and vLLM's own cache has blocks of the "
                "former ones: the pool is not used until that cache is reset "
                "(POST /reset_prefix_cache)",
                method,
            )

    def named(self, version: str) -> None:
        """Share the blocks of updated weights with engines of the same training and version."""
        if self._updated and self._identified:
            key = hashlib.blake2b(version.encode(), digest_size=32, person=b"beluga-version")
            self.name = key.digest()

    def flushed(self) -> None:
        """Record that vLLM's own cache has no block of old weights."""
        self.known = True


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def follow(listener: UpdateListener) -> None:
    """Notify a listener of the updates of its engine, in the scheduler's process."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    for kind in _kinds(Executor):
        if "collective_rpc" in vars(kind):
            _wrap(kind, "collective_rpc", _calling)
    _wrap(EngineCore, "collective_rpc", _calling)
    _wrap(EngineCore, "set_weight_version", _naming)
    _wrap(KVCacheManager, "reset_prefix_cache", _flushing)
    _listeners.add(listener)


def _kinds(kind: Any) -> Iterator[Any]:
    """Yield the classes below ``kind``; that of the engine's executor is loaded by now."""
    for below in kind.__subclasses__():
        yield below
        yield from _kinds(below)


def _wrap(owner: type, name: str, wrapped: Any) -> None:
    call = getattr(owner, name)
    if not hasattr(call, "beluga"):
        made = wrapped(call)
        made.beluga = True
        setattr(owner, name, made)


def _calling(call: Any) -> Any:
    """Wrap a function that calls a method in all workers."""

    @functools.wraps(call)
    def collective_rpc(self: Any, method: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(method, str) and method in HARMLESS:
            return call(self, method, *arguments, **named)
        listeners = _of(self)
        _before(listeners, method, *_given(arguments, named))
        try:
            return call(self, method, *arguments, **named)
        finally:
            _after(listeners, method, *_given(arguments, named))

    return collective_rpc


def _naming(call: Any) -> Any:
    @functools.wraps(call)
    def set_weight_version(self: Any, weight_version: str) -> Any:
        for listener in _of(self):
            listener.named(weight_version)
        return call(self, weight_version)

    return set_weight_version


def _flushing(call: Any) -> Any:
    @functools.wraps(call)
    def reset_prefix_cache(self: Any) -> Any:
        done = call(self)
        if done:
            for listener in list(_listeners):
                listener.flushed(self)
        return done

    return reset_prefix_cache


def _given(arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of the method in the workers; the first of ours is a timeout."""
    args = named.get("args", arguments[1] if len(arguments) > 1 else ())
    kwargs = named.get("kwargs", arguments[2] if len(arguments) > 2 else None) or {}
    return (*args, *kwargs.values())


def _before(listeners: list[Any], method: Any, *given: Any) -> None:
    for listener in listeners:
        if method == "add_lora" and given:
            listener.adapter_loads(given[0])
        elif _changes(method, given):
            listener.updated(_shown(method))


def _after(listeners: list[Any], method: Any, *given: Any) -> None:
    for listener in listeners:
        if method == "add_lora" and given:
            listener.adapter_loaded(given[0])
        elif method == "remove_lora" and given:
            listener.adapter_removed(given[0])
        elif _changes(method, given):
            listener.updated(_shown(method))


def _changes(method: Any, given: tuple[Any, ...]) -> bool:
    """Return whether a method may change the weights of the model."""
    if method in ("add_lora", "remove_lora"):
        return False
    if method == "sleep":  # level 1 keeps the weights in host memory, level 2 drops them
        return given[:1] != (1,)
    if method == "discard":
        return [str(tag) for tag in (given[0] if given else ())] != ["kv_cache"]
    return True


def _shown(method: Any) -> str:
    return method if isinstance(method, str) else getattr(method, "__name__", "a function")


def _of(owner: Any) -> list[Any]:
    """Return the listeners of an engine core or executor; without an id, all."""
    own = str(getattr(getattr(owner, "vllm_config", None), "instance_id", ""))
    return [
        listener for listener in list(_listeners) if not own or listener.instance_id in ("", own)
    ]


class EngineUpdates:
    """Handles the updates of one engine. ``manager()`` returns vLLM's manager of its own cache,
    once vLLM has bound it.
    """

    def __init__(
        self,
        schedule: Schedule,
        lookups: Lookups,
        vllm_config: Any,
        manager: Callable[[], Any],
    ) -> None:
        self.instance_id = str(getattr(vllm_config, "instance_id", ""))
        self._schedule, self._lookups, self._manager = schedule, lookups, manager
        follow(self)

    def updated(self, method: str) -> None:
        """Stop using blocks of the old weights, and saving them as blocks of the new ones."""
        self._lookups.generation.updated(method, clean=_is_empty(self._manager()))
        self._schedule.invalidate_all()

    def named(self, version: str) -> None:
        """Share blocks with other engines that were updated to this version."""
        self._lookups.generation.named(version)

    def flushed(self, manager: Any) -> None:
        """Use the pool again, because no request can use blocks of the old weights."""
        if manager is not self._manager():
            return
        if not self._lookups.generation.known:
            self._schedule.invalidate_all()
            self._lookups.generation.flushed()
        self._lookups.adapters.flushed()

    def adapter_loads(self, lora: Any) -> None:
        """Record the state of an adapter's files before the workers read them."""
        self._lookups.adapters.loads(lora)

    def adapter_loaded(self, lora: Any) -> None:
        """Compare the state of an adapter's files after the workers have read them."""
        self._lookups.adapters.loaded(lora)

    def adapter_removed(self, number: int) -> None:
        """Drop the state of an adapter's files."""
        self._lookups.adapters.removed(number)


def _is_empty(manager: Any) -> bool:
    """Return whether vLLM's own cache has no block that a request uses or may find."""
    pool = getattr(manager, "block_pool", None)
    cached = getattr(pool, "cached_block_hashes_by_block", None)
    if pool is None or cached is None:
        return False
    used = pool.num_gpu_blocks - pool.get_num_free_blocks()
    return not cached and used <= 1  # vLLM always uses one, as a placeholder
