# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What the server shows of its sessions and tenants: what each session holds, which are
quarantined, and the parts of a pool that belong to tenants (``csrc/index/shares.c``).

A block's entry has the fingerprint of its namespace: 64 bits of a digest. In the namespaces of a
tenant, the upper half is derived from the tenant's name alone (:func:`fingerprint_of`). So a server
can map each block to its tenant, even after a takeover, without a table of names in the pool.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from beluga._ffi import ffi, lib
from beluga.arguments import of_type, short
from beluga.errors import BadReplyError, BadTypeError, BadValueError, raise_for_status
from beluga.figures import Counters, counters
from beluga.rpc import KINDS, Quota

if TYPE_CHECKING:
    from collections.abc import Iterable

    from beluga._ffi import core
    from beluga.rpc import Client


_STATES = {lib.BL_SESSION_LIVE: "live", lib.BL_SESSION_SUSPECT: "suspect"}
_TRUST = {lib.BL_SESSION_WATCHED: "watched", lib.BL_SESSION_HEARTBEAT: "heartbeat"}
_PAGES_MAX = 4096  # replies in one list of sessions

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


@dataclasses.dataclass(frozen=True, slots=True)
class SessionView:
    """One session in the server's view.

    ``state`` is live, or suspect: the server cannot rule out that it still writes, so its lane and
    ``held_bytes`` are quarantined. ``since_s`` is the time in that state. ``trust`` is how the
    server detects its end: watched (its process is on the server's host), heartbeat (only a stopped
    heartbeat, which proves nothing), or broken (the memory of its lane fails). ``pid`` is None
    where the server cannot see the process. ``kind`` is one of ``KINDS``, or server for sessions of
    the server's own process, such as those that move blocks between tiers. ``bytes`` is the size of
    its grants and pinned blocks.
    """

    nonce: str
    epoch: int
    lane: int
    host: int
    pid: int | None
    kind: str
    state: str
    trust: str
    since_s: float
    heartbeat_s: float
    call_count: int
    grant_count: int
    pin_count: int
    bytes: int
    held_bytes: int

    @classmethod
    def of(cls, view: core.bl_session_view, server_pid: int) -> SessionView:
        """Convert a cffi ``bl_session_view`` of a server with this pid."""
        kind = KINDS[view.kind] if view.kind < len(KINDS) else str(view.kind)
        return cls(
            nonce=f"{view.nonce:016x}",
            epoch=view.epoch,
            lane=view.lane,
            host=view.host,
            pid=view.pid or None,
            kind="server" if view.pid == server_pid else kind,
            state=_STATES.get(view.state, "unknown"),
            trust=_TRUST.get(view.trust, "broken"),
            since_s=view.since_ns / 1e9,
            heartbeat_s=view.heartbeat_ns / 1e9,
            call_count=view.call_count,
            grant_count=view.grant_count,
            pin_count=view.pin_count,
            bytes=view.bytes,
            held_bytes=view.held_bytes,
        )

    def why(self, *, epoch: int) -> str:
        """Return why a session is suspect, for the server of this epoch."""
        if self.trust == "broken":
            return "the memory of its lane fails"
        if self.epoch != epoch:
            return f"it is from epoch {self.epoch}, has not attached again and is not proven dead"
        return f"its heartbeat stopped {self.heartbeat_s:,.0f} s ago, and it is not proven dead"

    def freed_by(self) -> str:
        """Return what ends the quarantine of a suspect session."""
        process = "the process" if self.pid is None else f"process {self.pid}"
        if self.trust in ("watched", "broken"):
            return f"the end of {process} on host {self.host}"
        return (
            f"the session attaches again or closes; a reboot of host {self.host}; or, when "
            f"that host is switched off, a new server with 'beluga serve --declare-gone'"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Sessions:
    """The sessions, their quota, and whether the pool is being drained."""

    sessions: tuple[SessionView, ...]
    quota: Quota
    draining: bool


def fetch_sessions(client: Client) -> Sessions:
    """Request the list of sessions from the server, from any host. Raises RpcError."""
    sessions: list[SessionView] = []
    first = 0
    for _ in range(_PAGES_MAX):
        head, views = _fetch_page(client, first)
        sessions += views
        if not head.more or not views:
            break
        first = views[-1].lane + 1
    limits = head.quota
    quota = Quota(
        grants=limits.grant_count,
        pins=limits.pin_count,
        bytes=limits.bytes,
        calls_per_s=limits.calls_per_s,
    )
    return Sessions(tuple(sessions), quota, bool(head.draining))


def _fetch_page(client: Client, first: int) -> tuple[core.bl_sessions_reply, list[SessionView]]:
    reply = client.call(lib.BL_METHOD_SESSIONS, struct.pack("=I", first))
    start, size = ffi.sizeof("bl_sessions_reply"), ffi.sizeof("bl_session_view")
    head = ffi.new("bl_sessions_reply *")
    if len(reply) < start:
        raise BadReplyError("the list of sessions is truncated")
    ffi.memmove(head, reply, start)
    if len(reply) != start + head.count * size:
        raise BadReplyError("the list of sessions has another length than its header")
    views = ffi.new("bl_session_view[]", head.count)
    ffi.memmove(views, reply[start:], head.count * size)
    return head, [SessionView.of(views[row], head.pid) for row in range(head.count)]


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
    encoded = [_part(salt), *(_part(name) + _part(fields[name]) for name in sorted(fields))]
    return hashlib.blake2b(b"".join(encoded), digest_size=16, person=b"beluga-namespace").digest()


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
    millionths = ffi.new("uint32_t[]", [_millionths(part) for part in shares.values()])
    rules, count = ffi.new("bl_share_rule[]", lib.BL_SHARE_RULES), 0
    for share, name in enumerate(shares, 1):
        for value, mask in _rules(name):
            rules[count].value, rules[count].mask, rules[count].share = value, mask, share
            count += 1
    raise_for_status(
        lib.bl_index_share(index, millionths, len(shares), rules, count), "setting the shares"
    )


def read_shares(index: core.bl_index | core.Null, names: Iterable[str]) -> list[TenantShare]:
    """Return the shares with their use; the share of all others comes first."""
    out = ffi.new("bl_share_view[]", lib.BL_SHARE_COUNT)
    count = lib.bl_index_shares(index, out, lib.BL_SHARE_COUNT)
    return [
        TenantShare.of(view, name=name)
        for name, view in zip((OTHERS, *names), (out[row] for row in range(count)), strict=True)
    ]
