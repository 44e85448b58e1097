# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The namespaces that processes of this host have opened on a pool, for diagnosis.

The pool stores only a namespace's fingerprint. Each cache writes the fields of its namespace to the
pool's runtime directory, but never a salt or anything derived from one. Caches work without these
files.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path

from beluga.index import Field
from beluga.kvcache.keys import Namespace

_FILES_MAX = 4096  # namespaces per pool
_FOLDER = "namespaces"
_SALTS = {"cache_salt"}  # fields that hold a tenant's secret (beluga/connectors/lmcache/)


@dataclasses.dataclass(frozen=True, slots=True)
class KnownNamespace:
    """A namespace that was opened on this host. If it has ``secret`` parts (a salt, or fields of
    bytes), its keys cannot be computed from ``fields``.
    """

    fingerprint: int
    fields: Mapping[str, str | int]
    secret: bool


def leave_namespace(directory: Path, namespace: Namespace) -> None:
    """Write a namespace's fields for :func:`known_namespaces`, if possible."""
    file = directory / _FOLDER / f"{namespace.fingerprint:016x}.json"
    shown = {name: value for name, value in namespace.fields.items() if not _hidden(name, value)}
    secret = namespace.salted or len(shown) < len(namespace.fields)
    try:
        if file.exists():
            return
        # The directory's mode decides who may read, not this process's umask
        rights = directory.stat().st_mode
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
    except (OSError, ValueError):  # a full or read-only file system, or a name that is not text
        return


def known_namespaces(directory: Path) -> list[KnownNamespace]:
    """Return the namespaces that were opened on this host. Unreadable files are skipped."""
    found = []
    for file in sorted(directory.glob(f"{_FOLDER}/*.json")):
        try:
            record = json.loads(file.read_text())
            fields = {str(name): _shown(value) for name, value in record["fields"].items()}
            found.append(KnownNamespace(int(file.stem, 16), fields, bool(record["secret"])))
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
    """Whether a field is secret: bytes, which may be derived from a secret, or an engine's salt."""
    return isinstance(value, bytes) or (name in _SALTS and value != "")


def _shown(value: object) -> str | int:
    if not isinstance(value, (str, int)):
        raise TypeError
    return value
