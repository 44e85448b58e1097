# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Keys of blocks: an engine's digest names tokens, and a namespace names their KV data.

Digests are uniformly random bytes, which engines compute anyway. :func:`fold` makes 128-bit keys of
a whole batch in one call into C. Other names are hashed first, by :func:`hash_keys`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from beluga._ffi import core, ffi, lib
from beluga.arguments import of_type, short
from beluga.errors import BadTypeError, BadValueError, raise_for_status
from beluga.index import TENANT, Field, digest_of, fingerprint_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

DIGEST_SIZE_MIN, DIGEST_SIZE_MAX = 16, 64


@dataclasses.dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace has the properties that two engines must have in common to share blocks.

    ``fields`` has everything that changes the bytes of a block: model, revision, dtype, kv_dtype,
    block_size, layout, tp_rank and so on; their order does not matter. ``salt`` is a tenant's
    secret: without it nobody finds the tenant's blocks, or learns whether they are there. The field
    ``tenant`` has the tenant's name, by which servers know its share of the pool.
    ``digest`` has 16 bytes, and namespaces are equal if their digests are equal. Raises
    :class:`~beluga.errors.BadTypeError` for other values than text, bytes and whole numbers.
    """

    fields: Mapping[str, Field] = dataclasses.field(compare=False)
    _: dataclasses.KW_ONLY
    salt: str | bytes = dataclasses.field(default=b"", repr=False, compare=False)
    digest: bytes = dataclasses.field(init=False, repr=False)
    fingerprint: int = dataclasses.field(init=False, repr=False, compare=False)
    """The 64 bits of it that the pool keeps with each block."""

    def __post_init__(self) -> None:
        if not isinstance(self.fields, Mapping) or not all(isinstance(f, str) for f in self.fields):
            raise BadTypeError(
                f"a namespace's fields have names of text; mend {short(self.fields)}"
            )
        fields = {
            name: int(value) if isinstance(value, np.integer) else value
            for name, value in sorted(self.fields.items())
        }
        salt = self.salt.encode() if isinstance(self.salt, str) else self.salt
        digest = digest_of(fields, salt)
        object.__setattr__(self, "fields", fields)  # a copy, so that the digest stays true
        object.__setattr__(self, "digest", digest)
        object.__setattr__(self, "fingerprint", fingerprint_of(fields, digest))

    @property
    def salted(self) -> bool:
        """Whether a salt hides its blocks."""
        return bool(self.salt)

    @classmethod
    def of(cls, value: Namespace | Mapping[str, Field] | Field) -> Namespace:
        """Return ``value`` if it is a namespace, or the one with these fields or this name."""
        if isinstance(value, Namespace):
            return value
        return cls(value if isinstance(value, Mapping) else {"name": value})

    def of_tenant(self, tenant: str) -> Namespace:
        """Return the tenant's own namespace with the same fields. Without a name it is this one."""
        of_type("tenant", tenant, str)
        return Namespace({**self.fields, TENANT: tenant}, salt=self.salt) if tenant else self


def _joined(digests: Sequence[bytes]) -> tuple[bytes, int]:
    """Return digests end to end, and the size of each. They are not looked at one by one unless
    something is wrong.
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
                f"a key is {DIGEST_SIZE_MIN} to {DIGEST_SIZE_MAX} bytes, not {short(digest)}; "
                "give beluga.kvcache.hash_keys() of names"
            )
    if len(sizes) > 1:
        raise BadValueError(
            f"digests of {min(sizes)} to {max(sizes)} bytes; give all the same size"
        )
    if digests:
        raise BadValueError("a digest is no run of bytes; give bytes in a list")
    return b"", DIGEST_SIZE_MIN


def fold(namespace: Namespace, digests: Sequence[bytes] | NDArray[np.uint8]) -> NDArray[np.uint64]:
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
                f"digests are a {packed.dtype} array of shape {packed.shape}; "
                "give bytes in a list, or a uint8 array of shape (count, size)"
            )
        source = ffi.from_buffer("uint8_t[]", packed)
        count, size = packed.shape
    if not DIGEST_SIZE_MIN <= size <= DIGEST_SIZE_MAX:
        raise BadValueError(
            f"digests of {size} bytes; give {DIGEST_SIZE_MIN} to {DIGEST_SIZE_MAX} random bytes, "
            "or beluga.kvcache.hash_keys() of what you have"
        )
    keys = np.empty((count, 2), np.uint64)
    target = ffi.from_buffer("uint64_t[]", keys)
    raise_for_status(
        lib.bl_fold_keys(source, size, count, namespace.digest, target), "folding keys"
    )
    return keys


def hash_keys(values: Iterable[bytes | str]) -> NDArray[np.uint8]:
    """Return digests of names that are not random, for :func:`fold`. Raises BadTypeError.

    The result is a uint8 array of shape (count, 32). Text counts as its UTF-8 bytes.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise BadTypeError(f"names to hash are {short(values)}; give a list of text or bytes")
    values = list(values)
    for value in values:
        of_type("a name to hash", value, bytes, bytearray, memoryview, str)
    encoded = (value.encode() if isinstance(value, str) else value for value in values)
    digests = [hashlib.blake2b(v, digest_size=32, person=b"beluga-key").digest() for v in encoded]
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(len(digests), 32)
