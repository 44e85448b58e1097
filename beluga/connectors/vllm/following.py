# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Handles changes of the engine's weights and adapters on the scheduler's side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from beluga.connectors.vllm.updates import follow

if TYPE_CHECKING:
    from collections.abc import Callable

    from beluga.connectors.vllm.lookups import Lookups
    from beluga.connectors.vllm.schedule import Schedule


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
        self._schedule.doubt_all()

    def named(self, version: str) -> None:
        """Share blocks with other engines that were updated to this version."""
        self._lookups.generation.named(version)

    def flushed(self, manager: Any) -> None:
        """Use the pool again, because no request can use blocks of the old weights."""
        if manager is not self._manager():
            return
        if not self._lookups.generation.known:
            self._schedule.doubt_all()
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
