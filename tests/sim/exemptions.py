# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Sites whose removal the simulator need not detect, each with its reason. A site is named by file,
function, verb and its index among equal verbs of that function. The lack of a test is not a reason:
a mutant that survives is a missing test or a needless fence, and is resolved as one of them.
"""

from __future__ import annotations

from exempt_conditions import REASONED, TESTED, Conditions

Name = tuple[str, str, str, int]

_HINT = "a hint to the hardware: the load that follows reads the same line, only later"
_ALONE = "runs before any other process can open the pool: the superblocks are written last"
_POLLED = (
    "a poll: an old line has an old sequence or count and is ignored, and the next poll, after "
    "another full fence, reads the new one; this fence affects time, never bytes"
)
_OFF = (
    "completes stores that the poller's own full fence completes at its next poll anyway: it saves"
    " the time until then, which is longer only if the poller sleeps first"
)
_FAILED = (
    "only whether the page faults matters, its bytes are not used, and no memory of the simulator "
    "faults: tests/crash/test_faults.py runs it over memory that does"
)
_REVIVED = (
    "needed where a machine takes over another's host number with a copy of that line in its "
    "cache; in the simulator, as on one machine, a number is one host forever"
)
_PROVEN = (
    "in the simulator no other process runs between a server's last full fence and its check of a "
    "proof, so no device writes between that fence and the proof; a CPU needs it for the order"
)
_FLUSHED = (
    "covered: the full fence of bl_server_still() stands between the end of a session and the next "
    "grant"
)

_CALLED = (
    "in the simulator no load is done before the reply that it depends on is read; on a CPU the "
    "invalidation could be done before the load of the reply"
)

_LEFT_OUT: dict[Name, str] = {
    ("index/retire.c", "bl_page_touch", "fence_full", 0): _FAILED,
    ("index/retire.c", "bl_page_touch", "invalidate", 0): _FAILED,
    ("index/retire.c", "bl_page_touch", "fence_full", 1): _FAILED,
    ("index/retire.c", "bl_page_touch", "fetch", 0): _FAILED,
    ("index/retire.c", "bl_extent_retire", "fence_store", 0): (
        "only for the check of a pool without a server: no entry outlives its extent. Recovery "
        "drops such an entry without it, and no memory of the simulator faults"
    ),
    ("kvcache/put.c", "bl_kv_flush", "fence_full", 1): (
        "the full fence of the abort's first poll completes the flushes: in the simulator no "
        "client pauses before it until the server has granted the space again; on a CPU one may"
    ),
    ("rpc/server.c", "bl_lane_gather", "prefetch_line", 0): _HINT,
    ("rpc/lane.c", "bl_lane_take", "prefetch_line", 0): _HINT,
    ("transfer/cpu.c", "bl_part_prefetch", "prefetch_range", 0): _HINT,
    ("pool/pool.c", "bl_pool_format_guarded", "stream", 0): _ALONE,
    ("pool/pool.c", "bl_pool_format_guarded", "fence_store", 0): _ALONE,
    ("rpc/housekeeping.c", "bl_lobby_look", "fence_full", 0): _POLLED,
    ("rpc/housekeeping.c", "bl_housekeeping_watch", "fence_full", 0): _POLLED,
    ("rpc/server.c", "bl_server_round", "fence_full", 0): _POLLED,
    ("rpc/server.c", "bl_server_rest", "announce", 0): (
        "a server that does not announce its sleep does not sleep, which costs time"
    ),
    ("rpc/lobby.c", "bl_lobby_reply_read", "fence_full", 0): _POLLED,
    ("rpc/lobby.c", "bl_lobby_reply_read", "fence_full", 1): _POLLED,
    ("rpc/lane.c", "bl_session_given_up", "fence_full", 0): _POLLED,
    ("rpc/lane.c", "bl_session_given_up", "fence_full", 1): _POLLED,
    ("rpc/server.c", "bl_lane_reply", "fence_store", 1): _OFF,
    ("rpc/lobby.c", "bl_lobby_send", "fence_store", 0): _OFF,
    ("liveness/heartbeat.c", "bl_heartbeat_farewell", "fence_store", 1): _OFF,
    ("rpc/housekeeping.c", "bl_lobby_publish", "fence_store", 0): _OFF,
    ("rpc/lobby.c", "bl_lobby_line", "fence_full", 0): _REVIVED,
    ("rpc/lobby.c", "bl_lobby_line", "invalidate", 0): _REVIVED,
    ("rpc/lobby.c", "bl_lobby_line", "fence_full", 1): _REVIVED,
    ("index/index.c", "bl_index_flush", "fence_full", 0): _PROVEN,
    ("index/index.c", "bl_index_flush_held", "fence_full", 0): _PROVEN,
    ("index/index.c", "bl_index_flush", "fence_full", 1): _FLUSHED,
    ("index/index.c", "bl_index_flush_held", "fence_full", 1): _FLUSHED,
    ("rpc/housekeeping.c", "bl_housekeeping_write", "fence_store", 0): (
        "covered: the full fence of bl_server_still() stands between the line and the reply that "
        "relies on it, and a store fence between a takeover's lines and SERVING"
    ),
    ("kvcache/put.c", "bl_kv_commit", "fence_store", 0): (
        "covered: a commit never fits into one line, so bl_bulk_send() fences between the payload "
        "and the request; it is kept in case a commit fits into one line in the future"
    ),
    ("kvcache/get.c", "bl_checksums_read", "fence_full", 1): (
        "covered: bl_entry_look() fenced after the reply that named the block, and nothing newer "
        "than that reply is relied on"
    ),
    ("index/recover.c", "bl_scan_refetch", "fence_full", 0): (
        "covered: the refetch of the other half's lines, or the next batch, fences before the loads"
    ),
    ("index/recover.c", "bl_scan_refetch", "fence_full", 1): (
        "covered: publishing TAKING ended with a full fence, and so did the refetch before"
    ),
    ("index/recover.c", "bl_recover_mark", "verify", 0): (
        "a damaged mark is used as if it were whole: bl_extents_adopt() checks its fields, and "
        "blocks that do not fit are dropped"
    ),
    ("index/recover.c", "bl_recover_name", "verify", 0): (
        "a damaged name is copied with its check, which does not match: every reader refuses it "
        "again"
    ),
    ("index/journal.c", "bl_names_guarded", "fence_full", 0): _CALLED,
    ("index/recover.c", "bl_recover_entries", "verify", 0): (
        "a damaged entry is copied with its check, which does not match: every reader refuses it "
        "again"
    ),
    ("rpc/declare.c", "bl_declared_heartbeat", "fence_full", 0): _POLLED,
    ("rpc/declare.c", "bl_declared_heartbeat", "fence_full", 1): _POLLED,
    ("rpc/declare.c", "bl_declare_all", "fence_full", 0): (
        "covered: the reads before it, of candidates' lines and heartbeats, ended with full fences"
    ),
    ("rpc/declare.c", "bl_declare_all", "fence_full", 1): (
        "an old line leaves its session out of the declaration, so that it stays suspect; and only"
        " the first can be old, because the read of each session's heartbeat ends with a full "
        "fence"
    ),
    ("rpc/takeover.c", "bl_server_heartbeats", "fence_full", 0): _POLLED,
    ("rpc/takeover.c", "bl_server_heartbeats", "fence_full", 1): _POLLED,
    ("rpc/takeover.c", "bl_server_heartbeats", "fence_full", 2): _POLLED,
    ("rpc/takeover.c", "bl_server_heartbeats", "fence_full", 3): _POLLED,
    ("rpc/takeover.c", "bl_server_heartbeats", "invalidate", 0): (
        "an old first count makes a dead server seem alive for one more attempt of its rival, "
        "never a live one dead"
    ),
}


_PADDING = "the line after it is padding: lines that are polled are 128 bytes apart"
_AREA = (
    "a message is followed by the rest of its bulk area, which only its sender writes, and which "
    "no message of the simulator fills"
)

_LONGER: dict[Name, str] = {
    ("index/recover.c", "bl_recover_name", "stream_line", 0): (
        "the line after it is the next block's name, which is written next if that block has one"
    ),
    ("liveness/heartbeat.c", "bl_heartbeat_once", "stream_line", 0): _PADDING,
    ("rpc/lobby.c", "bl_lobby_send", "stream_line", 0): _PADDING,
    ("rpc/housekeeping.c", "bl_lobby_publish", "stream_line", 0): _PADDING,
    ("rpc/lane.c", "bl_lane_send", "stream_line", 0): _PADDING,
    ("rpc/server.c", "bl_lane_reply", "stream_line", 0): _PADDING,
    ("rpc/lane.c", "bl_bulk_send", "stream", 0): _AREA,
    ("rpc/lane.c", "bl_bulk_send", "stream_line", 0): _AREA,
    ("rpc/server.c", "bl_bulk_answer", "stream", 0): _AREA,
}

_RANGES: dict[Name, str] = {
    ("index/index.c", "bl_index_flush_held", "invalidate", 0): (
        "its last line is the last of a run of blocks, which no payload that a device of the "
        "simulator writes reaches"
    ),
    ("rpc/elect.c", "bl_candidates_read", "invalidate", 0): (
        "its last line is the twin of the last host number, which no host of the simulator has"
    ),
}

_LATE = (
    "an invalidation after the fence of one poll is done before the next poll: an old line is "
    "ignored, or has the same value as before, so this costs a poll, never bytes"
)
_BEHIND = "comes after its own fence, which is not needed: see the exemption of that fence"
_BEGINS = (
    "the first heartbeat comes a step later, before its process announces itself; the next ones "
    "are another thread's"
)

_SERVING = (
    "covered: no other process reads this server's half before the fence that precedes SERVING"
)
_HINTED = "the verb that then comes before it is a prefetch: no loaded value is used"

_DEFERRED: dict[Name, str] = {
    ("index/index.c", "bl_index_flush", "invalidate", 0): _BEHIND,
    ("index/index.c", "bl_index_flush_held", "invalidate", 0): _BEHIND,
    ("kvcache/put.c", "bl_kv_flush_guarded", "invalidate", 0): (
        "comes after its own fence, but before the store fence of bl_bulk_send(), which every "
        "abort executes: a CPU orders a flush with that, the simulator does not"
    ),
    ("liveness/heartbeat.c", "bl_heartbeat_farewell", "stream_line", 0): _BEHIND,
    ("transfer/cpu.c", "bl_gather_direct", "stream", 0): (
        "comes after the fence of bl_kv_commit() at the latest, and before that of bl_bulk_send():"
        " see the exemption of the former"
    ),
    ("rpc/server.c", "bl_round_refetch", "invalidate", 0): _LATE,
    ("transfer/cpu.c", "bl_part_scatter", "fence_full", 1): _HINTED,
    ("transfer/cpu.c", "bl_part_pick", "fence_full", 1): (
        "the first chunk may be an old copy then: its checksum, which is always requested here, "
        "detects that, and other cases are caught where the fence is omitted"
    ),
    ("rpc/session.c", "bl_session_pump_all", "fence_store", 0): (
        "comes after its ring, as that of bl_lane_call() does, where it is caught: the server "
        "polls the lane for bl_quiet_ns() after a ring, and a client that sends a batch hardly "
        "ever pauses for that long between the two"
    ),
    ("rpc/lane.c", "bl_lane_take", "fence_full", 0): _HINTED,
    ("rpc/lane.c", "bl_lane_take", "invalidate", 0): _LATE,
    ("rpc/lane.c", "bl_session_given_up", "invalidate", 0): _LATE,
    ("rpc/lobby.c", "bl_lobby_reply_read", "invalidate", 0): _LATE,
    ("liveness/heartbeat.c", "bl_heartbeat_once", "fence_store", 0): _BEGINS,
    ("liveness/heartbeat.c", "bl_heartbeat_once", "stream_line", 0): _BEGINS,
    ("rpc/declare.c", "bl_declared_heartbeat", "invalidate", 0): _BEHIND,
    ("rpc/declare.c", "bl_declare_all", "invalidate", 0): _BEHIND,
    ("rpc/housekeeping.c", "bl_housekeeping_watch", "invalidate", 0): _BEHIND,
    ("rpc/housekeeping.c", "bl_lobby_look", "invalidate", 0): _BEHIND,
    ("pool/register.h", "bl_register_write", "stream_line", 1): (
        "comes after its own fence; both writers of a register continue with a full fence, and the"
        " second copy alone adds nothing to the first"
    ),
    ("rpc/standby.c", "bl_watch_silent", "invalidate", 0): (
        "comes after its load: the heartbeat is seen one poll later, as if it had been written then"
    ),
    ("rpc/takeover.c", "bl_server_heartbeats", "invalidate", 1): _BEHIND,
    ("rpc/housekeeping.c", "bl_housekeeping_write", "stream_line", 0): _BEHIND,
    ("rpc/housekeeping.c", "bl_lobby_publish", "stream_line", 0): _BEHIND,
    ("rpc/lobby.c", "bl_lobby_send", "stream_line", 0): _BEHIND,
    ("rpc/lane.c", "bl_lane_send", "stream_line", 0): _BEHIND,
    ("rpc/server.c", "bl_lane_reply", "stream_line", 0): _BEHIND,
    ("kvcache/put.c", "bl_checksums_write", "stream", 0): _BEHIND,
    ("index/table.c", "bl_entry_clear", "stream_line", 0): _BEHIND,
    ("index/table.c", "bl_name_write", "stream_line", 0): (
        "an entry may be in memory before its name: a repeated commit writes the name again"
    ),
    ("index/journal.c", "bl_names_guarded", "fence_full", 0): _CALLED,
    ("index/recover.c", "bl_recover_name", "stream_line", 0): _SERVING,
    ("index/recover.c", "bl_recover_entries", "stream_line", 0): _SERVING,
}


_OTHER_HALF: dict[Name, str] = {
    ("rpc/declare.c", "bl_declare_all", "invalidate", 0): (
        "the loop drops both halves in either case; a line that is old by then leaves its session "
        "out of the declaration, so that it stays suspect"
    ),
    ("rpc/declare.c", "bl_declare_all", "load_line", 0): (
        "the loop reads both halves in either case; a line that is old by then leaves its session "
        "out of the declaration, so that it stays suspect"
    ),
}


def _no_worse(exempt: dict[Name, str]) -> dict[Name, str]:
    """Return the other changes of a fence, an invalidation or a hint that may be omitted: if it is
    late, or covers a part of its range, or another range, it does more than nothing.
    """
    weak = ("fence_store", "fence_full", "invalidate", "prefetch_line", "prefetch_range")
    return {name: why for name, why in exempt.items() if name[2] in weak}


def _conditions(value: str) -> dict[Name, str]:
    """Return the exemptions of conditions that may always have this value."""
    named = {key: f"fails without it: {test}" for key, test in _flat(TESTED, value).items()}
    return _flat(REASONED, value) | named


def _flat(tables: Conditions, value: str) -> dict[Name, str]:
    return {
        (file, function, text, index): why
        for (file, function), table in tables.items()
        for (text, index, forced), why in table.items()
        if forced == value
    }


# The exempt sites of each change in simulator.CHANGES.
EXEMPTIONS: dict[str, dict[Name, str]] = {
    "left out": _LEFT_OUT,
    "deferred": _no_worse(_LEFT_OUT) | _DEFERRED,
    "without its first line": _no_worse(_LEFT_OUT),
    "without its last line": _no_worse(_LEFT_OUT) | _RANGES,
    "with a line more": _LONGER,
    "in the other half": _no_worse(_LEFT_OUT) | _OTHER_HALF,
    "true": _conditions("true"),
    "false": _conditions("false"),
}
