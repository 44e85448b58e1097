# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Keys of blocks. An engine's digest identifies tokens; a namespace identifies their KV data.

Digests are uniformly random bytes, which engines compute anyway. :func:`fold` computes the 128-bit
keys of a whole batch with one C call. Hash other names first, with :func:`hash_keys`.

The pool stores only a namespace's fingerprint. For diagnosis, each cache writes the fields of its
namespace to the pool's runtime directory, but never a salt or anything derived from one. Caches
work without these files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from beluga._ffi import core, ffi, lib
from beluga.arguments import StrPath, of_type, path_of, short
from beluga.errors import BadTypeError, BadValueError, raise_for_status
from beluga.index import TENANT, Field, digest_of, fingerprint_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


DIGEST_SIZE_MIN, DIGEST_SIZE_MAX = 16, 64


@dataclasses.dataclass(frozen=True, slots=True)
class Namespace:
    """The properties that two engines must have in common to share blocks.

    ``fields`` has everything that changes the bytes of a block: model, revision, dtype, kv_dtype,
    block_size, layout, tp_rank and so on, in any order. ``salt`` is a tenant's secret: without it,
    the tenant's blocks cannot be found, nor their presence detected. The field ``tenant`` is the
    tenant's name, which selects its share of the pool. ``digest`` has 16 bytes; namespaces are
    equal if their digests are equal. Raises :class:`~beluga.errors.BadTypeError` for other values
    than text, bytes and whole numbers.
    """

    fields: Mapping[str, Field] = dataclasses.field(compare=False)
    _: dataclasses.KW_ONLY
    salt: str | bytes = dataclasses.field(default=b"", repr=False, compare=False)
    digest: bytes = dataclasses.field(init=False, repr=False)
    fingerprint: int = dataclasses.field(init=False, repr=False, compare=False)
    """The 64 bits of the digest that are stored with each block."""

    def __post_init__(self) -> None:
        if not isinstance(self.fields, Mapping) or not all(isinstance(f, str) for f in self.fields):
            raise BadTypeError(
                f"the field names of a namespace must be text; fix {short(self.fields)}"
            )
        fields = {
            name: int(value) if isinstance(value, np.integer) else value
            for name, value in sorted(self.fields.items())
        }
        salt = self.salt.encode() if isinstance(self.salt, str) else self.salt
        digest = digest_of(fields, salt)
        # A copy, because changes would invalidate the digest
        object.__setattr__(self, "fields", fields)
        object.__setattr__(self, "digest", digest)
        object.__setattr__(self, "fingerprint", fingerprint_of(fields, digest))

    @property
    def salted(self) -> bool:
        """Whether the namespace has a salt."""
        return bool(self.salt)

    @classmethod
    def of(cls, value: Namespace | Mapping[str, Field] | Field) -> Namespace:
        """Return ``value`` if it is a namespace, else the namespace with these fields or this
        name.
        """
        if isinstance(value, Namespace):
            return value
        return cls(value if isinstance(value, Mapping) else {"name": value})

    def of_tenant(self, tenant: str) -> Namespace:
        """Return a copy of this namespace for a tenant; without a tenant, this namespace."""
        of_type("tenant", tenant, str)
        return Namespace({**self.fields, TENANT: tenant}, salt=self.salt) if tenant else self


def _joined(digests: Sequence[bytes]) -> tuple[bytes, int]:
    """Join digests, and return the size of each. Single digests are only inspected after an
    error.
    """
    try:
        joined = b"".join(digests)
    except (TypeError, BufferError, ValueError):
        joined = b""
    sizes = set(map(len, digests)) if joined else set()
    if len(sizes) == 1 and len(joined) == len(digests) * (size := sizes.pop()):
        return joined, size
    for digest in digests:
        if not isinstance(digest, bytes | bytearray | memoryview | np.ndarray):
            raise BadTypeError(
                f"a key must have {DIGEST_SIZE_MIN} to {DIGEST_SIZE_MAX} bytes, but is "
                f"{short(digest)}; give beluga.kvcache.hash_keys() of names"
            )
    if len(sizes) > 1:
        raise BadValueError(
            f"digests have {min(sizes)} to {max(sizes)} bytes; give digests of equal size"
        )
    if digests:
        raise BadValueError("a digest is not bytes; give a list of bytes")
    return b"", DIGEST_SIZE_MIN


def fold(
    namespace: Namespace, digests: Sequence[bytes] | NDArray[np.uint8] | NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Return the keys of digests in a namespace: a uint64 array of shape (count, 2).

    ``digests`` have 16 to 64 uniformly random bytes each. They are a list of bytes, or a uint8
    array (or other buffer) of shape (count, size). Raises :class:`ValueError` for any other shape.
    """
    if isinstance(digests, (list, tuple)):
        joined, size = _joined(digests)
        source: bytes | core.uint8_p = joined
        count = len(digests)
    else:
        packed = np.ascontiguousarray(np.asarray(digests))
        if packed.dtype != np.uint8 or packed.ndim != 2:
            raise BadValueError(
                f"digests are a {packed.dtype} array of shape {packed.shape}; give a list of "
                "bytes, or a uint8 array of shape (count, size)"
            )
        source = ffi.from_buffer("uint8_t[]", packed)
        count, size = packed.shape
    if not DIGEST_SIZE_MIN <= size <= DIGEST_SIZE_MAX:
        raise BadValueError(
            f"digests have {size} bytes; give {DIGEST_SIZE_MIN} to {DIGEST_SIZE_MAX} random bytes, "
            "or beluga.kvcache.hash_keys() of other names"
        )
    keys = np.empty((count, 2), np.uint64)
    target = ffi.from_buffer("uint64_t[]", keys)
    raise_for_status(
        lib.bl_fold_keys(source, size, count, namespace.digest, target), "folding keys"
    )
    return keys


def hash_keys(values: Iterable[bytes | str]) -> NDArray[np.uint8]:
    """Hash names that are not random, for :func:`fold`. Raises BadTypeError.

    The result is a uint8 array of shape (count, 32). Text is hashed as UTF-8.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise BadTypeError(f"names to hash are {short(values)}; give a list of text or bytes")
    values = list(values)
    for value in values:
        of_type("a name to hash", value, bytes, bytearray, memoryview, str)
    encoded = (value.encode() if isinstance(value, str) else value for value in values)
    digests = [hashlib.blake2b(v, digest_size=32, person=b"beluga-key").digest() for v in encoded]
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(len(digests), 32)


_FILES_MAX = 4096  # namespaces per pool; clients that choose salts can fill half of them
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
        if len(list(file.parent.iterdir())) >= (_FILES_MAX // 2 if secret else _FILES_MAX):
            return
        draft = file.with_suffix(f".{os.getpid()}")
        draft.touch(mode=0o600)
        draft.chmod(rights & 0o660)
        draft.write_text(json.dumps({"fields": shown, "secret": secret}))
        draft.replace(file)
    except (OSError, ValueError):  # a full or read-only file system, or a name that is not text
        return


def known_namespaces(directory: StrPath) -> list[KnownNamespace]:
    """Return the namespaces that were opened on this host. Unreadable files are skipped."""
    directory = path_of("directory", directory)
    found = []
    for file in sorted(directory.glob(f"{_FOLDER}/*.json")):
        try:
            record = json.loads(file.read_text())
            fields = {str(name): _shown(value) for name, value in record["fields"].items()}
            found.append(KnownNamespace(int(file.stem, 16), fields, bool(record["secret"])))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def namespaces_changed_ns(directory: StrPath) -> int:
    """Return when :func:`known_namespaces` last changed; 0 if there are none."""
    directory = path_of("directory", directory)
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
