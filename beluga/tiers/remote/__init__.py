# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The remote tier: blocks in a store that several pools share. :func:`open_remote` opens it by URL.

``store`` is the interface of a store. ``objects`` (S3, GCS, Azure, a folder, memory), ``valkey``
(Valkey and Redis) and ``mooncake`` (Mooncake Store) implement it over existing clients. ``tier``
turns a store into a :class:`beluga.tiers.tier.LowerTier`, and ``health`` has the threads and the
circuit breaker for a store that hangs or fails.

A new store is one module with the five methods of :class:`ObjectStore`, and its scheme in
``_STORES``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from beluga.errors import TierError
from beluga.listening import shown_url
from beluga.tiers.remote.mooncake import MooncakeStore
from beluga.tiers.remote.objects import ObstoreStore, no_panic, object_store, store_location
from beluga.tiers.remote.store import ObjectStore, RefusedError, RemoteSettings
from beluga.tiers.remote.tier import RemoteTier
from beluga.tiers.remote.valkey import ValkeyStore

__all__ = [
    "ObjectStore",
    "RefusedError",
    "RemoteSettings",
    "RemoteTier",
    "check_remote",
    "no_panic",
    "object_store",
    "open_remote",
    "shown_remote",
    "split_remote",
    "store_name",
]

_STORES: dict[str, Callable[[SplitResult, RemoteSettings], ObjectStore]] = {
    **dict.fromkeys(("s3", "gs", "az", "file", "memory"), ObstoreStore),
    **dict.fromkeys(("redis", "rediss", "valkey", "valkeys"), ValkeyStore),
    "mooncake": MooncakeStore,
}


def open_remote(url: str, *, settings: RemoteSettings | None = None) -> RemoteTier:
    """Open the remote tier of a URL.

    ========================================== ===============================================
    URL                                        store
    ========================================== ===============================================
    ``s3://BUCKET/PREFIX?endpoint=http://...`` S3 or a compatible store; the query has
                                               obstore's options; also gs:// and az://
    ``file:///PATH``                           a folder, which several hosts may mount
    ``memory:///``                             this process's memory, for tests
    ``redis://HOST:PORT/DB``                   Valkey or Redis; rediss:// is with TLS
    ``mooncake://MASTER:PORT``                 Mooncake Store; its options are below
    ========================================== ===============================================

    The options of Mooncake Store are ``local`` (this host's name, 127.0.0.1 by default),
    ``metadata`` (P2PHANDSHAKE), ``protocol`` (tcp), ``device`` (none) and ``buffer`` (bytes for
    transfers, 256 MiB).

    This does not contact the store, which may start later. Raises TierError for an invalid URL and
    for a missing package.
    """
    parts = split_remote(url)
    settings = settings or RemoteSettings()
    return RemoteTier(
        _STORES[parts.scheme](parts, settings), name=shown_remote(url), settings=settings
    )


def check_remote(url: str) -> None:
    """Raise TierError for a URL that :func:`open_remote` would reject, and for a folder that this
    user cannot write. Neither contacts the store nor creates a folder.
    """
    parts = split_remote(url)
    if parts.scheme != "file":
        _STORES[parts.scheme](parts, RemoteSettings()).close()
    elif parts.query or parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise TierError(f"{url} is not a folder's URL; write file:///PATH")
    else:
        _check_folder(Path(unquote(parts.path)))


def _check_folder(path: Path) -> None:
    """Raise TierError if a store cannot be in this folder, which is created with its parents."""
    existing = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not existing.is_dir():
        raise TierError(f"{existing} is not a folder; give the store of file://{path} another one")
    if not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        raise TierError(f"{existing} cannot be written by this user; give another folder")


def split_remote(url: str) -> SplitResult:
    """Split the URL of a supported store into its parts. Raises TierError."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError for an invalid port
    except ValueError:  # the text may have a part of the password
        raise TierError(
            "the remote store's URL has an invalid host or port; write a /, ? or # of a password "
            "as %2F, %3F or %23"
        ) from None
    if parts.scheme not in _STORES:
        known = ", ".join(f"{scheme}://" for scheme in _STORES)
        raise TierError(
            f"the remote store's URL has no supported scheme; give one that begins with {known}"
        )
    return parts


def shown_remote(url: str) -> str:
    """Return the URL of a store without passwords and options."""
    parts = split_remote(url)
    host = parts.hostname or ""
    address = f"{host}:{parts.port}" if parts.port else host
    return shown_url(f"{parts.scheme}://{address}{parts.path}")


def store_name(url: str) -> str:
    """Return the name of a store in remembered removals: its URL without passwords and options, and
    a digest of the endpoint and the account, where they are given. So a removal waits for the store
    that had the block, and not for one of the same name at another endpoint. Raises TierError.
    """
    name = shown_remote(url)
    try:
        location = store_location(split_remote(url))
    except ValueError as error:
        raise TierError(f"{name}: {error}") from None
    if not any(location):
        return name
    return f"{name} {hashlib.sha256(repr(location).encode()).hexdigest()[:12]}"
