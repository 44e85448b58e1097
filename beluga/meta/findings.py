# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The text for each finding of a pool check.

A line has the kind of the finding, its place, and its consequence for the pool. The names are those
of bl_finding_kind in csrc/api/check.h. ``{place}`` is a half, host, lane, slot, stripe or block;
api/check.h says what ``{detail}`` is.
"""

from __future__ import annotations

from beluga._ffi import core, lib

MISS = "it reads as a miss"
DROPPED = "its blocks are lost at the next restart"

TEXTS = {
    "EPOCH_DAMAGED": "half {place}: the epoch line's check is wrong",
    "EPOCH_HALF": "half {place}: an epoch line of the other half stands here",
    "EPOCH_STATE": "half {place}: the epoch line's state is none",
    "EPOCH_NONSENSE": "half {place}: the server's host number or nonce is none",
    "EPOCH_FUTURE": "half {place}: an epoch that no generation has room for",
    "HEARTBEAT_DAMAGED": "half {place}: the check of the server's heartbeat is wrong",
    "HEARTBEAT_STRANGE": "half {place}: the heartbeat is not of the server that serves",
    "CANDIDATE_DAMAGED": "host {place}: a candidate line's check is wrong",
    "CANDIDATE_NONSENSE": "host {place}: the candidate line names no ballot of its own, or nobody",
    "CANDIDATE_FUTURE": "host {place}: asks for an epoch that no generation has room for",
    "LOBBY_REQUEST_DAMAGED": "host {place}: the lobby request is torn or its check wrong",
    "LOBBY_REQUEST_NONSENSE": "host {place}: the lobby request asks for nothing, or for nobody",
    "LOBBY_REQUEST_HOST": "host {place}: the lobby request is of another host",
    "LOBBY_REQUEST_FUTURE": "host {place}: asks a server of an epoch that has not been",
    "LOBBY_REPLY_DAMAGED": "host {place}: the lobby reply is torn or its check wrong",
    "LOBBY_REPLY_NONSENSE": "host {place}: the lobby reply gives a lane that is none",
    "LOBBY_REPLY_FUTURE": "host {place}: the lobby reply is of an epoch that has not been",
    "SESSION_DAMAGED": "lane {place}: the session line's check is wrong; whose it was is unknown",
    "SESSION_STATE": "lane {place}: the session's state is none",
    "SESSION_HOST": "lane {place}: the session's host number is out of range",
    "SESSION_NONSENSE": "lane {place}: a session without nonce or epoch",
    "SESSION_FUTURE": "lane {place}: the session is of an epoch that has not been",
    "SESSION_TWICE": "lane {place}: its session has lane {detail} too",
    "LANE_HEARTBEAT_DAMAGED": "lane {place}: the check of the client's heartbeat is wrong",
    "REQUEST_DAMAGED": "slot {place}: the request line at {detail:#x} is torn or damaged",
    "REQUEST_NONSENSE": "slot {place}: the request line at {detail:#x} makes no sense",
    "REPLY_DAMAGED": "slot {place}: the reply line at {detail:#x} is torn or damaged",
    "REPLY_NONSENSE": "slot {place}: the reply line at {detail:#x} makes no sense",
    "EXTENT_DAMAGED": f"stripe {{place}}: the mark's check is wrong; {DROPPED}",
    "EXTENT_PLACE": f"stripe {{place}}: the mark names another stripe; {DROPPED}",
    "EXTENT_STATE": f"stripe {{place}}: the mark's state is none; {DROPPED}",
    "EXTENT_SIZE": f"stripe {{place}}: no extent or block has that size; {DROPPED}",
    "EXTENT_BEYOND": f"stripe {{place}}: the extent ends beyond the pool; {DROPPED}",
    "EXTENT_FIT": f"stripe {{place}}: not the number of blocks that fit into it; {DROPPED}",
    "EXTENT_OVERLAP": f"stripe {{place}}: overlaps the extent at stripe {{detail}}; {DROPPED}",
    "EXTENT_CLASSES": f"stripe {{place}}: one block size more than a pool has; {DROPPED}",
    "EXTENT_FUTURE": f"stripe {{place}}: of an epoch that has not been; {DROPPED}",
    "ENTRY_DAMAGED": f"block {{place}}: the entry's check is wrong; {MISS}",
    "ENTRY_STATE": f"block {{place}}: the entry's state is none; {MISS}",
    "ENTRY_LENGTH": f"block {{place}}: no block has that length; {MISS}",
    "ENTRY_CHUNK": f"block {{place}}: chunks smaller than a line; {MISS}",
    "ENTRY_UNALIGNED": f"block {{place}}: its offset is not that of a page; {MISS}",
    "ENTRY_BEYOND": f"block {{place}}: not in the data stripes; {MISS}",
    "ENTRY_FUTURE": "block {place}: its generation is of an epoch that has not been",
    "ENTRY_HOMELESS": f"block {{place}}: lies in no extent of its size; {MISS} after a restart",
    "ENTRY_OVERLAP": "block {place}: shares its space with block {detail}, which is newer",
    "ENTRY_TWICE": "block {place}: has the key of block {detail}, which is newer",
    "ENTRY_GENERATION": "block {place}: has the generation of block {detail}",
    "CHECKSUMS_DAMAGED": f"block {{place}}: its checksums are not those committed; {MISS}",
    "PAYLOAD_DAMAGED": f"block {{place}}: its bytes are not those committed; {MISS}",
    "RESERVED": "line at {detail:#x}: a reserved field is used",
    "STRAY": "line at {detail:#x}: bytes where nothing lies",
}

KINDS = {getattr(lib, f"BL_FINDING_{name}"): name.lower().replace("_", "-") for name in TEXTS}
_BY_NUMBER = {getattr(lib, f"BL_FINDING_{name}"): text for name, text in TEXTS.items()}


def describe(finding: core.bl_finding) -> str:
    """Describe a ``bl_finding`` in one line: its kind, its place and its meaning."""
    text = _BY_NUMBER[finding.kind].format(place=finding.place, detail=finding.detail)
    return f"{KINDS[finding.kind]} {text}"
