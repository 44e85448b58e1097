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

import contextlib
import functools
import logging
import os
import sys
import threading
import types
from collections.abc import Callable, Generator
from typing import Any, TypeAlias

from beluga.config import variables
from beluga.connectors.releases import RELEASES
from beluga.errors import ConnectorError

logger = logging.getLogger(__name__)

_Hook: TypeAlias = "Generator[None, Any, None]"

UPDATED = "updated "  # the beginning of the version of updated weights
_SCHEDULER = "sglang.srt.managers.scheduler"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"
_RUNNER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_UPDATED = "flush_cache_after_weight_update"
_PROCESS = os.urandom(16).hex()  # for a process without the id of a run
_BACKUP = "enable_weights_cpu_backup"  # the setting that keeps released weights in host memory
_FAILED = types.SimpleNamespace(success=False)  # in place of the answer of a call that raised


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
        self._observed = False  # whether updates are observed
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
            if not self._observed:
                return setting
            if self._version is None and self._flushed and setting != self._void:
                self._version = _updated(setting)  # the version was set after the change
            return None if self._session else self._version

    def watch(self) -> None:
        """Observe updates from now on, in a process with SGLang's scheduler. Raises ConnectorError
        if that scheduler updates its weights in an unknown way.
        """
        if _SCHEDULER not in sys.modules and _UPDATER not in sys.modules:
            return
        updater = getattr(sys.modules.get(_UPDATER), "SchedulerWeightUpdaterManager", None)
        if not hasattr(updater, _UPDATED):
            raise ConnectorError(
                "this version of SGLang changes its weights in an unknown way, so Beluga "
                "could load KV of other weights; use SGLang 0.5.23"
            )
        with self._lock:
            if not self._observed:
                self._observed, self._version = True, _version_setting()
        for name, hook in _HOOKS.items():
            _observe(updater, name, hook)
        runner = getattr(sys.modules.get(_RUNNER), "WeightUpdater", None)
        _observe(runner, "end_weight_update", _runner_session)

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


# What is observed of a call of SGLang: a generator that runs to its ``yield`` before the call, and
# receives the answer there, or _FAILED.


def _update(recv_req: Any, *arguments: Any) -> _Hook:
    """Observe the end of an update, which a failed write does not reach."""
    answer = yield
    # SGLang before 0.5.22 raises if requests are running and nothing was flushed; later releases
    # return that. A draft model that was not updated is passed on as success False.
    flushed = (answer is None or answer == arguments) and (not arguments or bool(arguments[0]))
    WEIGHTS.changed(recv_req.weight_version, flushed=flushed and bool(recv_req.flush_cache))


def _write(*_: Any, **__: Any) -> _Hook:
    """Observe a write of weights. If it fails, they may be a mix of old and new."""
    before = WEIGHTS.changes
    if not _is_success((yield)) or WEIGHTS.changes == before:
        WEIGHTS.changed(None, flushed=False)


def _session_begin(*_: Any, **__: Any) -> _Hook:
    WEIGHTS.session(is_open=True)
    yield


def _session_end(*_: Any, **__: Any) -> _Hook:
    """Observe the end of a session. If it fails, the weights have unknown contents."""
    if not _is_success((yield)):
        WEIGHTS.changed(None, flushed=False)
    WEIGHTS.session(is_open=False)


def _release(recv_req: Any, *_: Any, **__: Any) -> _Hook:
    """Observe a release of memory. Weights without a copy in host memory are undefined afterwards,
    until an update writes them.
    """
    yield
    tags = getattr(recv_req, "tags", None) or ("weights", "kv_cache")
    if "weights" in tags and not _setting(_BACKUP):
        WEIGHTS.changed(None, flushed="kv_cache" in tags)


def _runner_session(*, run_post_load: bool) -> _Hook:
    """Observe the end of a session in the model's runner. Only this call shows that another process
    has written weights into SGLang's memory.
    """
    if run_post_load:
        WEIGHTS.changed(None, flushed=False)
    yield


_HOOKS: dict[str, Callable[..., _Hook]] = {
    _UPDATED: _update,
    "update_weights_from_disk": _write,
    "update_weights_from_distributed": _write,
    "update_weights_from_tensor": _write,
    "update_weights_from_ipc": _write,
    "begin_weight_update": _session_begin,
    "end_weight_update": _session_end,
    "release_memory_occupation": _release,
}


def _observe(owner: Any, name: str, hook: Callable[..., _Hook]) -> None:
    """Observe a method of SGLang. A release may lack one of them."""
    call = getattr(owner, name, None)
    if call is None or hasattr(call, "beluga"):
        return

    @functools.wraps(call)
    def observed(self: Any, *arguments: Any, **named: Any) -> Any:
        observer, answer = hook(*arguments, **named), _FAILED
        next(observer)
        try:
            answer = call(self, *arguments, **named)
            return answer
        finally:
            with contextlib.suppress(StopIteration):
                observer.send(answer)

    observed.beluga = True  # type: ignore[attr-defined]
    setattr(owner, name, observed)


def _is_success(answer: Any) -> bool:
    return bool(getattr(answer, "success", True))


def _version_setting() -> str:
    return str(_setting("weight_version"))


def _setting(name: str) -> Any:
    """Return the current value of a setting of SGLang, or "" in a process without settings."""
    try:
        from sglang.srt.runtime_context import get_context

        return get_context().config_leaf(name)
    except (ImportError, ValueError):
        return ""
