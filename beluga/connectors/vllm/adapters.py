# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""LoRA adapters: identifies the bytes that the workers have loaded, not just their names.

vLLM loads an adapter when it is added, or when the first request needs it, and again after it was
evicted from the workers' memory. It does not report which bytes it has read. So the state of the
files is recorded before the load, and compared at each use: while nothing has changed, the workers
have loaded these bytes. Blocks of an adapter whose files have changed are not shared until vLLM
loads it again (``load_inplace``, or unload and load).

vLLM's prefix cache identifies an adapter by its name and path. After other bytes were loaded under
both, the cache still has blocks of the old ones; requests that use them are not shared until that
cache is reset.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from beluga.connectors.files import (
    MEMORY_ONLY,
    FileDigests,
    Signature,
    filesystem_of,
    signature,
)
from beluga.connectors.identity import Files, ModelIdentity, counts
from beluga.errors import ConnectorError

if TYPE_CHECKING:
    import logging

ADAPTERS_MAX = 1 << 14  # adapters that are followed; further ones are not shared

_State: TypeAlias = "tuple[Path, Signature]"


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in use by a request: ``key`` distinguishes its blocks, and ``files`` are the files
    it was loaded from. Without an adapter both are empty.
    """

    key: bytes = b""
    path: Path = Path()
    files: Signature = ()

    @property
    def unchanged(self) -> bool:
        """Whether the files are unchanged since the request started."""
        return not self.key or _state_of(self.path) == (self.path, self.files)


NONE = Adapter()


class Adapters:
    """The adapters of one engine. Used by the scheduler's thread only."""

    def __init__(self, logger: logging.Logger, digests: FileDigests | None = None) -> None:
        self._logger, self._digests = logger, digests or FileDigests()
        self._loaded: dict[int, _State | None] = {}  # by vLLM's number; None: permanently unknown
        self._identities: dict[_State, ModelIdentity] = {}
        self._names: dict[str, str] = {}  # the bytes behind a name in vLLM's own cache
        self._warned: set[str] = set()

    def of(self, lora: Any) -> Adapter | None:
        """Return a request's adapter, or None while its bytes are being hashed.

        Raises ConnectorError for an adapter whose blocks must not be shared.
        """
        if lora is None:
            return NONE
        state = self._load(lora, again=bool(getattr(lora, "load_inplace", False)))
        known = self._loaded.get(_number(lora))
        if state is None:
            raise ConnectorError(
                f"the adapter {lora.lora_name} is not a folder with weights on a disk "
                f"({lora.lora_path}); load it from such a folder"
            )
        if known != state:
            # The workers may load these files when they need the adapter again; a link that leads
            # back to the former files later does not bring those back.
            if _number(lora) in self._loaded:
                self._loaded[_number(lora)] = None
            raise ConnectorError(
                f"the files of the adapter {lora.lora_name} have changed since vLLM loaded it; "
                "load it again, with load_inplace"
            )
        identity = self._identity(state)
        if not identity.ended:
            return None
        digest = identity.known
        if not digest:
            raise ConnectorError(
                f"the adapter {lora.lora_name} could not be read ({identity.refusal}); load it "
                "again"
            )
        if self._names.setdefault(lora.lora_name, digest) != digest:
            raise ConnectorError(
                f"the adapter {lora.lora_name} was loaded with other bytes before; reset vLLM's "
                "prefix cache (POST /reset_prefix_cache)"
            )
        key = hashlib.blake2b(digest.encode(), digest_size=32, person=b"beluga-adapter")
        return Adapter(key.digest(), *state)

    def loads(self, lora: Any) -> None:
        """Record the state of an adapter that vLLM is about to load."""
        state = self._load(lora, again=bool(getattr(lora, "load_inplace", False)))
        if state is not None and len(self._identities) < ADAPTERS_MAX:
            self._start(state)

    def loaded(self, lora: Any) -> None:
        """Compare the state of an adapter that vLLM has loaded."""
        number = _number(lora)
        known = self._loaded.get(number)
        if known is not None and _state_of(Path(lora.lora_path)) != known:
            self._loaded[number] = None

    def removed(self, number: int) -> None:
        """Drop an adapter that vLLM has removed."""
        self._loaded.pop(number, None)

    def flushed(self) -> None:
        """Record that vLLM's own cache is empty."""
        self._names.clear()

    def warn(self, error: ConnectorError) -> None:
        """Log why an adapter is not shared, once."""
        if str(error) not in self._warned and len(self._warned) < ADAPTERS_MAX:
            self._warned.add(str(error))
            self._logger.warning("beluga: %s; until then its blocks are not shared", error)

    def _load(self, lora: Any, *, again: bool) -> _State | None:
        number = _number(lora)
        first = again or (number not in self._loaded and len(self._loaded) < ADAPTERS_MAX)
        state = _state_of(Path(lora.lora_path), flush=first)
        if first:
            self._loaded[number] = state
        return state

    def _identity(self, state: _State) -> ModelIdentity:
        identity = self._identities.get(state)
        return identity if identity is not None else self._start(state)

    def _start(self, state: _State) -> ModelIdentity:
        identity = self._identities.get(state)
        if identity is None:
            if len(self._identities) >= ADAPTERS_MAX:
                self._identities.clear()  # identities are hashed again, or come from the cache
            source = Files(state[0], 0, self._digests)
            identity = self._identities[state] = ModelIdentity(source, logger=self._logger)
        return identity


def _number(lora: Any) -> int:
    """Return vLLM's number of an adapter, which must be unique and which the workers use."""
    return int(getattr(lora, "lora_int_id", 0))


def _state_of(path: Path, *, flush: bool = False) -> _State | None:
    """Return the present files of an adapter, or None if they cannot be read. After ``flush`` every
    write changes their state; then it is also None where writes may leave no trace.
    """
    try:
        if not path.exists() or (flush and filesystem_of(path) in MEMORY_ONLY):
            return None
        return path, signature(path, counts, flush=flush)
    except OSError:
        return None
