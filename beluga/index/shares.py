# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The parts of a pool that belong to tenants (``csrc/index/shares.c``).

A block's entry has the fingerprint of its namespace: 64 bits of a digest. In the namespaces of a
tenant, the upper half is derived from the tenant's name alone (:func:`fingerprint_of`). So a server
can map each block to its tenant, even after a takeover, without a table of names in the pool.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from beluga._ffi import ffi, lib
from beluga.arguments import of_type, short
from beluga.errors import BadTypeError, BadValueError, raise_for_status
from beluga.figures import Counters, counters

if TYPE_CHECKING:
    from collections.abc import Iterable

    from beluga._ffi import core

Field: TypeAlias = "str | int | bytes"

TENANT = "tenant"
"""The namespace field that holds the tenant's name."""

OTHERS = "others"
"""The name of the share of all tenants without a share of their own."""

_NAME_MAX = 200  # characters
_SHARES_MAX = int(lib.BL_SHARE_COUNT) - 1
_WHOLE = int(lib.BL_SHARE_WHOLE)
_ALL, _TENANT_BITS = (1 << 64) - 1, 0xFFFF_FFFF << 32
_FINGERPRINT = re.compile("[0-9a-f]{16}")


@counters("bl_share_view")
class TenantShare(Counters):
    """A tenant's share of the pool and its use, in bytes of space, and how many of its blocks were
    evicted since the takeover. Hints may favor ``hint_bytes`` of its blocks, and now favor
    ``hinted_bytes``.

    The share :data:`OTHERS` is that of all tenants without a share of their own.
    """

    name: str


def _part(value: Field) -> bytes:
    """Encode a value as kind, length, bytes, so that different lists of values have different
    bytes.
    """
    if isinstance(value, bytes):
        kind, encoded = b"b", value
    elif isinstance(value, str):
        kind, encoded = b"s", value.encode()
    elif isinstance(value, int):
        kind, encoded = b"i", b"%d" % value
    else:
        raise BadTypeError(
            f"a namespace may have text, bytes and whole numbers; convert {short(value)} to text"
        )
    return kind + len(encoded).to_bytes(8, "little") + encoded


def digest_of(fields: Mapping[str, Field], salt: bytes) -> bytes:
    """Return the 16-byte digest of a namespace. The order of the fields does not matter."""
    parts = [_part(salt), *(_part(name) + _part(fields[name]) for name in sorted(fields))]
    return hashlib.blake2b(b"".join(parts), digest_size=16, person=b"beluga-namespace").digest()


def fingerprint_of(fields: Mapping[str, Field], digest: bytes) -> int:
    """Return the 64 bits of a namespace that are stored with each block."""
    whole = int.from_bytes(digest[:8], "little")
    tenant = fields.get(TENANT, "")
    if tenant == "":
        return whole
    if not isinstance(tenant, str):
        raise BadTypeError(f"the tenant of a namespace is {short(tenant)}; give its name as text")
    return _tenant_bits(tenant) | whole & ~_TENANT_BITS & _ALL


def _tenant_bits(name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=4, person=b"beluga-tenant").digest()
    return int.from_bytes(digest, "little") << 32


def _rules(name: str) -> Iterable[tuple[int, int]]:
    """Return the fingerprints that a share's name matches, as values under masks: those of a
    tenant, of a namespace that has only this name, and of the namespace with this fingerprint.
    """
    yield _tenant_bits(name), _TENANT_BITS
    fields: dict[str, Field] = {"name": name}
    yield fingerprint_of(fields, digest_of(fields, b"")), _ALL
    if _FINGERPRINT.fullmatch(name):
        yield int(name, 16), _ALL


def check_shares(shares: Mapping[str, float]) -> dict[str, float]:
    """Check the tenants' shares and return them as fractions. Raises BadTypeError and
    BadValueError.
    """
    of_type("shares", shares, Mapping)
    if len(shares) > _SHARES_MAX:
        raise BadValueError(f"{len(shares)} shares are too many; give {_SHARES_MAX} at most")
    for name, part in shares.items():
        of_type("the name of a share", name, str)
        of_type(f"the share of {short(name)}", part, int, float)
        if not 0 < len(name) <= _NAME_MAX or name == OTHERS or not name.isprintable():
            raise BadValueError(
                f"the name of a share is {short(name)}; give a tenant's name of 1 to {_NAME_MAX} "
                f"printable characters other than {OTHERS!r}"
            )
        if not 1 / _WHOLE <= part <= 1:  # false for NaN, too
            raise BadValueError(
                f"the share of {short(name)} is {part * 100:g} %; give more than 0 and at most 100"
            )
    total = sum(_millionths(part) for part in shares.values())
    if total > _WHOLE:
        raise BadValueError(
            f"the shares add up to {total * 100 / _WHOLE:g} % of the pool; give at most 100 %"
        )
    return dict(shares)


def check_budget(part: float) -> int:
    """Return the part of each share that hints may favor, in millionths. Raises BadTypeError and
    BadValueError.
    """
    of_type("hint_budget", part, int, float)
    if not 0 <= part <= 1:
        raise BadValueError(f"hint_budget is {part:g}; give a fraction of each share, from 0 to 1")
    return round(part * _WHOLE)


def _millionths(part: float) -> int:
    return max(1, round(part * _WHOLE))


def give_shares(index: core.bl_index | core.Null, shares: Mapping[str, float]) -> None:
    """Set the tenants' shares of a pool before its server starts."""
    parts = ffi.new("uint32_t[]", [_millionths(part) for part in shares.values()])
    rules, count = ffi.new("bl_share_rule[]", lib.BL_SHARE_RULES), 0
    for share, name in enumerate(shares, 1):
        for value, mask in _rules(name):
            rules[count].value, rules[count].mask, rules[count].share = value, mask, share
            count += 1
    raise_for_status(
        lib.bl_index_share(index, parts, len(shares), rules, count), "setting the shares"
    )


def read_shares(index: core.bl_index | core.Null, names: Iterable[str]) -> list[TenantShare]:
    """Return the shares with their use; the share of all others comes first."""
    out = ffi.new("bl_share_view[]", lib.BL_SHARE_COUNT)
    count = lib.bl_index_shares(index, out, lib.BL_SHARE_COUNT)
    return [
        TenantShare.of(one, name=name)
        for name, one in zip((OTHERS, *names), (out[place] for place in range(count)), strict=True)
    ]
