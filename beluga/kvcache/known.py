# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The namespaces that processes of this host have opened on a pool, for people who look at it.

The pool has only a namespace's fingerprint. Each cache leaves the fields of its namespace in the
pool's runtime directory, but never a salt, nor what was made of one. Nothing is decided by these
files, so a cache works without them.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path

from beluga.index import Field
from beluga.kvcache.keys import Namespace

_FILES_MAX = 4096  # namespaces that are remembered for a pool
_FOLDER = "namespaces"
_SALTS = {"cache_salt"}  # fields that are a tenant's secret (beluga/connectors/lmcache/)


@dataclasses.dataclass(frozen=True, slots=True)
class KnownNamespace:
    """A namespace that was opened on this host. With ``secret`` parts (a salt, or fields of bytes)
    its keys cannot be made from ``fields``.
    """

    fingerprint: int
    fields: Mapping[str, str | int]
    secret: bool


def leave_namespace(directory: Path, namespace: Namespace) -> None:
    """Remember a namespace's fields for :func:`known_namespaces`, if that is possible."""
    file = directory / _FOLDER / f"{namespace.fingerprint:016x}.json"
    shown = {name: value for name, value in namespace.fields.items() if not _hidden(name, value)}
    secret = namespace.salted or len(shown) < len(namespace.fields)
    try:
        if file.exists():
            return
        rights = directory.stat().st_mode  # they say who may read, not this process's umask
        file.parent.mkdir(exist_ok=True)
        if file.parent.stat().st_uid == os.geteuid():
            file.parent.chmod(rights & 0o2770)
        if len(list(file.parent.iterdir())) >= _FILES_MAX:
            return
        draft = file.with_suffix(f".{os.getpid()}")
        draft.touch(mode=0o600)
        draft.chmod(rights & 0o660)
        draft.write_text(json.dumps({"fields": shown, "secret": secret}))
        draft.replace(file)
    except (OSError, ValueError):  # a full or read-only place, or a name that is not text
        return


def known_namespaces(directory: Path) -> list[KnownNamespace]:
    """Return the namespaces that were opened on this host; files that cannot be read are left
    out.
    """
    found = []
    for file in sorted(directory.glob(f"{_FOLDER}/*.json")):
        try:
            told = json.loads(file.read_text())
            fields = {str(name): _shown(value) for name, value in told["fields"].items()}
            found.append(KnownNamespace(int(file.stem, 16), fields, bool(told["secret"])))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def namespaces_changed_ns(directory: Path) -> int:
    """Return when :func:`known_namespaces` last changed; 0 if there are none."""
    try:
        return (directory / _FOLDER).stat().st_mtime_ns
    except OSError:
        return 0


def _hidden(name: str, value: Field) -> bool:
    """Return whether a field is a secret: bytes, which may be made of one, or an engine's salt."""
    return isinstance(value, bytes) or (name in _SALTS and value != "")


def _shown(value: object) -> str | int:
    if not isinstance(value, (str, int)):
        raise TypeError
    return value
