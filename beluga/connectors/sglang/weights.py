# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The version of SGLang's weights. They may change at run time, and backends are not notified.

SGLang identifies them by its ``weight_version``, and pages of one version are not used for another.
An update without a version, or one that keeps the KV of the old weights (``flush_cache=False``),
leaves pages of unknown origin. The pool is then neither read nor written until an update with a
version and a flush.

Two trainings may give one version to different weights. So pages of updated weights belong to this
run of SGLang, unless the operator's setting ``identity`` names the training.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from typing import Any

from beluga.config import variables
from beluga.connectors.releases import RELEASES
from beluga.errors import ConnectorError

logger = logging.getLogger(__name__)

UPDATED = "updated "  # the beginning of the version of updated weights
_SCHEDULER = "sglang.srt.managers.scheduler"
_UPDATER = (
    "sglang.srt.managers.scheduler_components.weight_updater",
    "SchedulerWeightUpdaterManager",
    "flush_cache_after_weight_update",
)
# Its methods that write weights. If one of them fails, the weights may be a mix of old and new.
_WRITES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
_BEGIN, _END = "begin_weight_update", "end_weight_update"  # around the updates of a session
_RELEASE = "release_memory_occupation"
_PROCESS = os.urandom(16).hex()  # for a process without the id of a run
_BACKUP = "enable_weights_cpu_backup"  # the setting that keeps released weights in host memory
_RUNNER = (
    "sglang.srt.model_executor.model_runner_components.weight_updater",
    "WeightUpdater",
    "end_weight_update",
)


def check_release(version: str) -> None:
    """Raise ConnectorError for a release of SGLang whose page keys include no LoRA adapter and no
    salt."""
    releases = RELEASES["sglang"]
    if not releases.has(version):
        first = ".".join(map(str, releases.first))
        raise ConnectorError(
            f"SGLang {version} gives pages of different LoRA adapters and cache salts the same "
            f"storage keys (sglang#38577); beluga needs SGLang {first} or later"
        )


def this_run() -> str:
    """Return a name of this run of SGLang, the same on all its ranks of a host."""
    return variables({"SGLANG_RUN_ID"}).get("SGLANG_RUN_ID") or _PROCESS


class Weights:
    """The version of this process's weights. SGLang's scheduler sets it, and threads of its cache
    read it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._warned = False  # whether updates are observed
        self._version: str | None = None
        self._void: str | None = None  # a version that no longer identifies the weights
        self._flushed = True
        self._session = False  # whether a session of updates is open
        self.changes = 0
        """The number of recorded changes."""

    def version(self) -> str | None:
        """Return SGLang's version of the weights, or None while it is unknown."""
        with self._lock:
            setting = _version_setting()
            if not self._warned:
                return setting
            if self._version is None and self._flushed and setting != self._void:
                self._version = _updated(setting)  # the version was set after the change
            return None if self._session else self._version

    def watch(self) -> None:
        """Observe updates from now on, in a process with SGLang's scheduler. Raises ConnectorError
        if that scheduler updates its weights in an unknown way.
        """
        if _SCHEDULER not in sys.modules and _UPDATER[0] not in sys.modules:
            return
        updater = _owner_of(_UPDATER)
        if updater is None:
            raise ConnectorError(
                "this version of SGLang changes its weights in an unknown way, so Beluga "
                "could load KV of other weights; use SGLang 0.5.23"
            )
        with self._lock:
            if not self._warned:
                self._warned, self._version = True, _version_setting()
        name = _UPDATER[2]
        if not hasattr(getattr(updater, name), "beluga"):
            setattr(updater, name, _after_update(getattr(updater, name)))
        others = (_BEGIN, _beginning), (_END, _ending), (_RELEASE, _releasing)
        for name, wrap in (*((write, _writing) for write in _WRITES), *others):
            call = getattr(updater, name, None)  # a release may lack one of them
            if call is not None and not hasattr(call, "beluga"):
                setattr(updater, name, wrap(call))
        runner, name = _owner_of(_RUNNER), _RUNNER[2]
        if runner is not None and not hasattr(getattr(runner, name), "beluga"):
            setattr(runner, name, _after_session(getattr(runner, name)))

    def changed(self, version: str | None, *, flushed: bool) -> None:
        """Record an update of the weights. ``version`` is the update's version, or None.
        ``flushed``: SGLang dropped all KV of the old weights.
        """
        known = flushed and version is not None
        with self._lock:
            self.changes += 1
            self._void, self._flushed = _version_setting(), flushed
            self._version = _updated(version) if known and version is not None else None
        if not known:
            logger.warning(
                "beluga: SGLang's weights were changed without a weight_version, or without "
                "flush_cache, or an update failed: the pool is not used until an update with both"
            )

    def session(self, *, is_open: bool) -> None:
        """Record the begin or the end of a session, in which several updates write one version."""
        with self._lock:
            self._session = is_open


WEIGHTS = Weights()


def _updated(version: str) -> str:
    """Return the name of updated weights. The weights that SGLang has started with may have the
    same version: every engine's first one is "default".
    """
    return UPDATED + version


def _after_update(call: Any) -> Any:
    """Wrap the function of SGLang that ends each update of the weights."""

    @functools.wraps(call)
    def flush_cache_after_weight_update(self: Any, recv_req: Any, *arguments: Any) -> Any:
        flushed = False
        try:
            answer = call(self, recv_req, *arguments)
            # SGLang before 0.5.22 raises if requests are running and nothing was flushed; later
            # releases return that.
            flushed = bool(recv_req.flush_cache) and (answer is None or answer == arguments)
            # A draft model that was not updated is passed on as success False.
            flushed = flushed and (not arguments or bool(arguments[0]))
            return answer
        finally:
            WEIGHTS.changed(recv_req.weight_version, flushed=flushed)

    flush_cache_after_weight_update.beluga = True  # type: ignore[attr-defined]
    return flush_cache_after_weight_update


def _writing(call: Any) -> Any:
    """Wrap a function of SGLang that writes weights. SGLang calls :data:`_UPDATER`'s function only
    after it has written all of them.
    """

    @functools.wraps(call)
    def write(self: Any, *arguments: Any, **named: Any) -> Any:
        before, whole = WEIGHTS.changes, False
        try:
            answer = call(self, *arguments, **named)
            whole = bool(getattr(answer, "success", True)) and WEIGHTS.changes != before
            return answer
        finally:
            if not whole:
                WEIGHTS.changed(None, flushed=False)

    write.beluga = True  # type: ignore[attr-defined]
    return write


def _beginning(call: Any) -> Any:
    """Wrap the function of SGLang that begins a session of updates."""

    @functools.wraps(call)
    def begin_weight_update(self: Any, *arguments: Any, **named: Any) -> Any:
        WEIGHTS.session(is_open=True)
        return call(self, *arguments, **named)

    begin_weight_update.beluga = True  # type: ignore[attr-defined]
    return begin_weight_update


def _ending(call: Any) -> Any:
    """Wrap the function of SGLang that ends a session of updates. A session that fails to end
    leaves weights of unknown contents.
    """

    @functools.wraps(call)
    def end_weight_update(self: Any, *arguments: Any, **named: Any) -> Any:
        done = False
        try:
            answer = call(self, *arguments, **named)
            done = bool(getattr(answer, "success", True))
            return answer
        finally:
            if not done:
                WEIGHTS.changed(None, flushed=False)
            WEIGHTS.session(is_open=False)

    end_weight_update.beluga = True  # type: ignore[attr-defined]
    return end_weight_update


def _releasing(call: Any) -> Any:
    """Wrap the function of SGLang that frees memory. Weights without a copy in host memory are
    undefined afterwards, until an update writes them.
    """

    @functools.wraps(call)
    def release_memory_occupation(self: Any, recv_req: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return call(self, recv_req, *arguments, **named)
        finally:
            tags = getattr(recv_req, "tags", None) or ("weights", "kv_cache")
            if "weights" in tags and not _setting(_BACKUP):
                WEIGHTS.changed(None, flushed="kv_cache" in tags)

    release_memory_occupation.beluga = True  # type: ignore[attr-defined]
    return release_memory_occupation


def _after_session(call: Any) -> Any:
    """Wrap the function of SGLang that ends a session of updates. Only this call shows that another
    process has written weights into SGLang's memory.
    """

    @functools.wraps(call)
    def end_weight_update(self: Any, *, run_post_load: bool) -> Any:
        if run_post_load:
            WEIGHTS.changed(None, flushed=False)
        return call(self, run_post_load=run_post_load)

    end_weight_update.beluga = True  # type: ignore[attr-defined]
    return end_weight_update


def _owner_of(where: tuple[str, str, str]) -> Any:
    """Return a class of SGLang that has this method, if its module is loaded; otherwise None."""
    module, owner, method = where
    cls = getattr(sys.modules.get(module), owner, None)
    return cls if hasattr(cls, method) else None


def _version_setting() -> str:
    return str(_setting("weight_version"))


def _setting(name: str) -> Any:
    """Return the current value of a setting of SGLang, or "" in a process without settings."""
    try:
        from sglang.srt.runtime_context import get_context

        return get_context().config_leaf(name)
    except (ImportError, ValueError):
        return ""
