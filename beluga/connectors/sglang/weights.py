# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Which weights SGLang computes with: they may be changed while it serves, and no backend is told.

SGLang's own name for them is its ``weight_version``, and pages of one version are not for another.
An update that names no version, or that keeps what the old weights have computed
(``flush_cache=False``), leaves pages of which nobody can say whose they are: from then on the pool
is neither read nor written, until an update that does both.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
import threading
from typing import Any

from beluga.connectors.naming import Fields, model_identity
from beluga.errors import ConnectorError

logger = logging.getLogger(__name__)

FIRST_RELEASE = (0, 5, 20)
_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)(\.?(?:dev|a|b|rc))?")

_SCHEDULER = "sglang.srt.managers.scheduler"
_UPDATER = (
    "sglang.srt.managers.scheduler_components.weight_updater",
    "SchedulerWeightUpdaterManager",
    "flush_cache_after_weight_update",
)
_RUNNER = (
    "sglang.srt.model_executor.model_runner_components.weight_updater",
    "WeightUpdater",
    "end_weight_update",
)

# What of SGLang's settings decides what its weights compute.
_MODEL_FIELDS = ("dtype", "kv_cache_dtype", "quantization", "load_format")


def check_release(version: str) -> None:
    """Raise ConnectorError for an SGLang whose keys of pages have no LoRA adapter and no salt."""
    found = _RELEASE.match(version)
    release = tuple(map(int, found.groups()[:3])) if found else ()
    before = found is not None and found[4] is not None  # one of those that lead to a release
    if release < FIRST_RELEASE or (release == FIRST_RELEASE and before):
        first = ".".join(map(str, FIRST_RELEASE))
        raise ConnectorError(
            f"SGLang {version} gives pages of different LoRA adapters and cache salts the same "
            f"storage keys (sglang#38577); beluga needs SGLang {first} or later"
        )


def model_fields() -> Fields:
    """The weights that SGLang has begun with, and its static adapters."""
    fields: Fields = {name: str(_setting(name)) for name in _MODEL_FIELDS}
    fields["overrides"] = str(_setting("json_model_override_args"))
    if path := _setting("model_path"):
        fields["weights"] = model_identity(str(path), str(_setting("revision")))
    if _setting("load_format") == "dummy":
        fields["seed"] = str(_setting("random_seed"))
    if adapters := _setting("lora_paths"):  # their ids are made of name and path, not of weights
        named = sorted((one.lora_name, model_identity(one.lora_path, "")) for one in adapters)
        fields["adapters"] = json.dumps(named)
    return fields


class Weights:
    """The weights of this process: SGLang's scheduler changes them, its cache's threads ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told = False  # whether changes are seen
        self._version: str | None = None
        self._void: str | None = None  # a version that no longer says which weights these are
        self._flushed = True

    def version(self) -> str | None:
        """What SGLang calls them; None while nobody can say."""
        with self._lock:
            said = _said_version()
            if not self._told:
                return said
            if self._version is None and self._flushed and said != self._void:
                self._version = said  # named after the change
            return self._version

    def watch(self) -> None:
        """See changes from now on, in a process that has SGLang's scheduler. Raises ConnectorError
        if that scheduler changes its weights in a way that is not known."""
        if _SCHEDULER not in sys.modules and _UPDATER[0] not in sys.modules:
            return
        updater = _found(_UPDATER)
        if updater is None:
            raise ConnectorError(
                "beluga does not know how this SGLang changes its weights, and would load KV of "
                "other weights; use SGLang 0.5.23"
            )
        with self._lock:
            if not self._told:
                self._told, self._version = True, _said_version()
        name = _UPDATER[2]
        if not hasattr(getattr(updater, name), "beluga"):
            setattr(updater, name, _after_update(getattr(updater, name)))
        runner, name = _found(_RUNNER), _RUNNER[2]
        if runner is not None and not hasattr(getattr(runner, name), "beluga"):
            setattr(runner, name, _after_session(getattr(runner, name)))

    def changed(self, version: str | None, *, flushed: bool) -> None:
        """The weights are others now. ``version``: what the update called them, if anything;
        ``flushed``: SGLang has nothing left that the old ones have computed."""
        known = flushed and version is not None
        with self._lock:
            self._void, self._flushed = _said_version(), flushed
            self._version = version if known else None
        if not known:
            logger.warning(
                "beluga: SGLang's weights were changed without a weight_version, or without "
                "flush_cache: the pool is not used until an update with both"
            )


WEIGHTS = Weights()


def _after_update(call: Any) -> Any:
    """SGLang's own function, which ends each update that has changed weights."""

    @functools.wraps(call)
    def flush_cache_after_weight_update(self: Any, recv_req: Any, *rest: Any) -> Any:
        flushed = False
        try:
            answer = call(self, recv_req, *rest)
            # Before 0.5.22 it raises what it now says: that requests run, and nothing was flushed.
            flushed = bool(recv_req.flush_cache) and (answer is None or answer == rest)
            return answer
        finally:
            WEIGHTS.changed(recv_req.weight_version, flushed=flushed)

    flush_cache_after_weight_update.beluga = True  # type: ignore[attr-defined]
    return flush_cache_after_weight_update


def _after_session(call: Any) -> Any:
    """SGLang's own function, which ends a session of updates: the only sign of weights that others
    have written into its memory."""

    @functools.wraps(call)
    def end_weight_update(self: Any, *, run_post_load: bool) -> Any:
        if run_post_load:
            WEIGHTS.changed(None, flushed=False)
        return call(self, run_post_load=run_post_load)

    end_weight_update.beluga = True  # type: ignore[attr-defined]
    return end_weight_update


def _found(where: tuple[str, str, str]) -> Any:
    """A class of SGLang's that has this method, in a module that is loaded; or None."""
    module, owner, method = where
    found = getattr(sys.modules.get(module), owner, None)
    return found if hasattr(found, method) else None


def _said_version() -> str:
    return str(_setting("weight_version"))


def _setting(name: str) -> Any:
    """One of SGLang's settings, as it is now; "" in a process that has none."""
    try:
        from sglang.srt.runtime_context import get_context

        return get_context().config_leaf(name)
    except (ImportError, ValueError):
        return ""
