# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The identity of LMCache's models, which it passes only by name, and of its metadata.

A model with a path is identified by its files. A hub name is not sufficient, because LMCache does
not pass the revision that its engine has loaded: such a model is rejected unless the operator sets
``identity``.

LMCache's server outlives its engines. A restarted engine may load other files from the same path,
while a running one still has the earlier ones; the server cannot distinguish them. So a model whose
files have changed is not used until the server is restarted, too.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beluga.connectors.identity import Model, ModelIdentity, Table, digest_of, source_of
from beluga.connectors.identity.models import SET_IDENTITY, Declared
from beluga.connectors.naming import Fields
from beluga.connectors.process import engine_start_ns
from beluga.errors import ConnectorError

if TYPE_CHECKING:
    import logging

MODELS_MAX = 1024  # models of one server; further ones miss
LOOK_S = 0.5  # how often a model's files are compared; no engine restarts in less

# LMCache adds this to the name of a model whose context is spread over ranks.
_DECORATION = "##lmcache-"

_LAYOUT = "the namespace has the shapes and types of the memory"
_KEY = "LMCache's key of a chunk has it"

LEFT_OUT: Table = {
    "LMCacheMetadata": {
        "model_name": "the identity of the weights covers their bytes, and the key has the name",
        "served_model_name": "a name for clients",
        "world_size": _KEY,
        "worker_id": _KEY,
        "local_world_size": "where the workers are",
        "local_worker_id": "where the workers are",
        "role": "what the process does with the same KV",
        "kv_dtype": _LAYOUT,
        "kv_shape": _LAYOUT,
        "kv_layer_groups_manager": _LAYOUT,
        "engine_id": "an address",
        "kv_connector_extra_config": "addresses",
    }
}


class Models:
    """The identities of models by name. Thread-safe. With ``outlives``, this process is not the
    engine that has loaded a model, and may outlive it.
    """

    def __init__(self, identity: str, logger: logging.Logger, *, outlives: bool = False) -> None:
        self._identity, self._logger, self._outlives = identity, logger, outlives
        self._lock = threading.Lock()
        self._looked_s: dict[str, float] = {}  # the times of the last comparisons
        self._former: dict[str, str] = {}  # digests of models whose files have changed
        self._found: dict[str, ModelIdentity | None] = {}  # None: rejected

    def check(self, name: str) -> None:
        """Start to identify a model. Raises ConnectorError if that is impossible."""
        identity = self._identify(name)
        with self._lock:
            self._found[name] = identity

    def digest(self, name: str) -> str:
        """Return the digest of a model's weights, or "" if it is not known yet or there is none."""
        found = self._of(name)
        return "" if found is None else found.known

    def last(self, name: str) -> str:
        """Return the digest under which a model's objects were stored, even if its files have
        changed since, or "".
        """
        return self.digest(name) or self._former.get(name, "")

    def pending(self, name: str) -> bool:
        """Return whether a model is being identified."""
        found = self._of(name)
        return found is not None and found.outcome is None

    def close(self) -> None:
        """Stop reading files."""
        with self._lock:
            found = list(self._found.values())
        for one in found:
            if one is not None:
                one.close()

    def _of(self, name: str) -> ModelIdentity | None:
        with self._lock:
            if name not in self._found and len(self._found) < MODELS_MAX:
                try:
                    self._found[name] = self._identify(name)
                except ConnectorError as error:
                    self._logger.error("beluga: the pool is not used for a model: %s", error)
                    self._found[name] = None
            found = self._found.get(name)
            if found is not None and self._outlives:
                found = self._look(name, found)
            return found

    def _look(self, name: str, found: ModelIdentity) -> ModelIdentity | None:
        """Reject a model whose files have changed. The lock is held."""
        now_s = time.monotonic()
        if now_s < self._looked_s.get(name, 0.0) + LOOK_S:
            return found
        self._looked_s[name] = now_s
        if found.unchanged:
            return found
        self._logger.error(
            "beluga: the files of the model %s have changed, so the pool is not used for it: "
            "restart LMCache's server and its engines",
            name,
        )
        found.close()
        self._former[name] = found.known
        self._found[name] = None
        return None

    def _identify(self, name: str) -> ModelIdentity:
        if self._identity:
            return ModelIdentity(Declared(f"declared {self._identity}"), logger=self._logger)
        path = Path(name.partition(_DECORATION)[0])
        if not path.is_absolute() or not path.exists():
            raise ConnectorError(
                f"LMCache passes only the model's name {name!r}, which does not identify the "
                "weights that its engine has loaded; start the engine with the path of a folder, "
                f"or {SET_IDENTITY}"
            )
        source = source_of(Model(str(path), since_ns=engine_start_ns()))
        return ModelIdentity(source, logger=self._logger)


def metadata_fields(metadata: Any, identity: str) -> Fields:
    """Return the field of a namespace for LMCache's metadata of an engine."""
    return {"metadata": digest_of(metadata, LEFT_OUT, path="metadata", identity=identity)}
