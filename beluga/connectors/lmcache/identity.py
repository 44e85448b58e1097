# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The identity of LMCache's models, which it passes only by name.

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
from typing import TYPE_CHECKING

from beluga.connectors.files import MEMORY_ONLY, filesystem_of
from beluga.connectors.identity import (
    SET_IDENTITY,
    Model,
    ModelIdentity,
    engine_start_ns,
    sources_of,
)
from beluga.errors import ConnectorError

if TYPE_CHECKING:
    import logging

MODELS_MAX = 1024  # models of one server; further ones miss
CHECK_S = 0.5  # how often a model's files are compared; no engine restarts in less

# LMCache adds this to the name of a model whose context is spread over ranks.
_DECORATION = "##lmcache-"


class Models:
    """The identities of models by name. Thread-safe. With ``outlives``, this process is not the
    engine that has loaded a model, and may outlive it.
    """

    def __init__(self, identity: str, logger: logging.Logger, *, outlives: bool = False) -> None:
        self._identity, self._logger, self._outlives = identity, logger, outlives
        self._lock = threading.Lock()
        self._checked_s: dict[str, float] = {}  # the times of the last comparisons
        self._former: dict[str, str] = {}  # digests of models whose files have changed
        self._identities: dict[str, ModelIdentity | None] = {}  # None: rejected

    def check(self, name: str) -> None:
        """Start to identify a model. Raises ConnectorError if that is impossible."""
        identity = self._identify(name)
        with self._lock:
            self._identities[name] = identity

    def digest(self, name: str) -> str:
        """Return the digest of a model's weights, or "" if it is not known yet or there is none."""
        identity = self._of(name)
        return "" if identity is None else identity.known

    def last(self, name: str) -> str:
        """Return the digest under which a model's objects were stored, even if its files have
        changed since, or "".
        """
        return self.digest(name) or self._former.get(name, "")

    def pending(self, name: str) -> bool:
        """Return whether a model is being identified."""
        identity = self._of(name)
        return identity is not None and not identity.ended

    def close(self) -> None:
        """Stop reading files."""
        with self._lock:
            identities = [
                identity for identity in self._identities.values() if identity is not None
            ]
        for identity in identities:
            identity.close()

    def _of(self, name: str) -> ModelIdentity | None:
        with self._lock:
            if name not in self._identities and len(self._identities) < MODELS_MAX:
                try:
                    self._identities[name] = self._identify(name)
                except ConnectorError as error:
                    self._logger.error("beluga: the pool is not used for a model: %s", error)
                    self._identities[name] = None
            identity = self._identities.get(name)
            if identity is None or not self._outlives:
                return identity
            return identity if self._is_unchanged(name, identity) else None

    def _is_unchanged(self, name: str, identity: ModelIdentity) -> bool:
        """Reject a model whose files have changed. The lock is held."""
        now_s = time.monotonic()
        if now_s < self._checked_s.get(name, 0.0) + CHECK_S:
            return True
        self._checked_s[name] = now_s
        if identity.source.unchanged():
            return True
        self._logger.error(
            "beluga: the files of the model %s have changed, so the pool is not used for it: "
            "restart LMCache's server and its engines",
            name,
        )
        identity.close()
        self._former[name] = identity.known
        self._identities[name] = None
        return False

    def _identify(self, name: str) -> ModelIdentity:
        path = Path(name.partition(_DECORATION)[0])
        if not self._identity and (not path.is_absolute() or not path.exists()):
            raise ConnectorError(
                f"LMCache passes only the model's name {name!r}, which does not identify the "
                "weights that its engine has loaded; start the engine with the path of a folder, "
                f"or {SET_IDENTITY}"
            )
        if self._outlives and filesystem_of(path) in MEMORY_ONLY and not self._identity:
            raise ConnectorError(
                f"the files of {path} are in memory, where a program may change them unseen while "
                f"this server runs; start the engine with a folder on a disk, or {SET_IDENTITY}"
            )
        since_ns = engine_start_ns()
        source = sources_of([Model(str(path), since_ns=since_ns)], self._identity, since_ns)
        return ModelIdentity(source, logger=self._logger)
