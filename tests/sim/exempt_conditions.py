# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Conditions whose removal the simulator need not detect, each with its reason. A condition is
named by file, function, its text and its index among equal ones of the function; the last word is
the value that it is forced to. Most of those with a reason only affect durations, or repeat another
check. If a Python test fails with the condition forced, it is named.
"""

from __future__ import annotations

# For each file and function: the condition, its place, its value.
Conditions = dict[tuple[str, str], dict[tuple[str, int, str], str]]

_ANN = (
    "decides what is reported to the simulator's oracle, which can only make it miss something here"
)
_NOT_SERVING = "a request goes to a server that does not serve, which costs time"
_VECTOR = (
    "checks the bytes with a damaged vector, which they do not match; old bytes with their own "
    "vector are not read, since both are refetched after the entry"
)
_CHECKED = "checks bytes though the caller did not request it, which costs time"
_CLOCK = "reads a clock for latencies that are not requested"
_CLOSED = "unlocks and closes no descriptor, which the kernel refuses"
_SUSPECT = "an inherited session is suspect already, so it can only end as GONE"
_COUNTED = "only whether a miss counts as a wrong checksum differs: tests/kvcache/test_cache.py"
_UNCOUNTED = "tests/index/test_block_calls.py::test_a_peek_counts_in_no_figure"
_ENDED = "a grant ends with its session, so the abort is refused for every caller"
_FENCED = "one more full fence, which costs time"
_FLUSH = "flushes what no device has written, or flushes it an additional time, which costs time"
_LATE = "a call that has timed out is tried once more with no time left, and times out again"
_LIFE = "the simulator's servers have no pidfds; one is NULL only where the kernel has none"
_LINK = "only who is charged for the bytes on the link differs, and the simulator has no link"
_LOOKED = "reads the epoch though no task was committed, which costs time"
_NAP = "only how long an idle server sleeps, or how often it reads its clock, differs"
_NEGATIVE = "the caller only checks whether it is negative: 1 has the same effect as 0"
_NO_BYTES = "copies no bytes"
_ORDER = (
    "only the order of the lanes in the next round differs, which affects fairness but no answer"
)
_PERIOD = "housekeeping is done more often than necessary, which costs time"
_PIECE = (
    "the check, which is in the same 8 bytes as the second sequence, covers all bytes before it"
)
_QUANTUM = (
    "only how much of a lane's turn a request counts for differs, which affects fairness but no "
    "answer"
)
_REREAD = "the line is read more often than necessary, and its last value is used"
_ANSWERLESS = (
    "tests/index/test_index_calls.py::test_a_message_that_a_server_cannot_answer_is_an_error"
)
_REMOVAL_WAIT = (
    "tests/index/test_index_calls.py::test_the_wait_of_a_removal_for_an_idle_disk_is_bounded"
)
_RINGS = "rings, or wakes the server, more often than necessary, which costs time"
_ROUSED = "polls quiet lanes without a ring of the doorbell, which costs time"
_RUNG = "a server with work polls the doorbells less often, at the latest after BL_DOORBELL_ROUNDS"
_SORTED = (
    "sorts what is already in order, or by a digit that is equal in all: the sort is stable, so "
    "nothing moves"
)
_STATE = "clients use the status of a commit's record, which has the same meaning as its state"
_THREADS = (
    "only which thread copies, and who is charged on the link, differs; the simulator has neither"
)
_UNREAD = "the bytes of a reply whose status is an error are not read"
_WIDE = "invalidates the same lines more often, or lines after the table, which costs time"
_WINDOW = (
    "only how many lines are read together differs: the first one without a reply ends the loop"
)

# The reason of each condition.
REASONED: Conditions = {
    ("transfer/cache_maintenance.c", "bl_maintenance_run"): {
        ("next.offset >= range.offset && next.offset <= range.end", 0, "false"): (
            "handles each range separately, and lines at their boundaries twice, which costs time"
        ),
        ("range.end > 0", 0, "true"): (
            "handles the empty range before the first one, which costs time"
        ),
        (
            "at < job->end",
            0,
            "true",
        ): "clips the ranges after the job to nothing, which costs time",
        ("i < job->count", 0, "true"): "the job's bytes end with the last range",
    },
    ("transfer/cache_maintenance.c", "bl_maintenance_take"): {
        ("maintenance == BL_MAINTENANCE_FLUSH", 0, "true"): (
            "a flush of the range begins with the same fence"
        ),
        ("maintenance == BL_MAINTENANCE_INVALIDATE", 0, "true"): (
            "memory that a device reads needs the most cache maintenance: the other two do a "
            "subset of it"
        ),
    },
    ("rpc/elect.c", "bl_ballot"): {
        ("phase == 2", 0, "false"): (
            "in the second phase the greatest accepted ballot is this server's own, so it is "
            "adopted unchanged"
        ),
    },
    ("rpc/elect.c", "bl_candidates_read"): {
        ("status < 0", 0, "true"): (
            "reads a candidate's line once more, from memory, which costs time"
        ),
    },
    ("pool/epoch.h", "bl_epoch_read"): {
        ("status == 1", 0, "true"): (
            "a line that was never written has the epoch 0, and a damaged one is an error in any "
            "case"
        ),
    },
    ("pool/epoch.h", "bl_epoch_serving"): {
        ("line->epoch != 0", 0, "true"): "a line that was never written has no state either",
        ("line->state == BL_SERVER_SERVING", 0, "true"): (
            "a server that takes over or has stopped gets requests without effect until the "
            "timeout or until a successor serves"
        ),
    },
    ("index/journal.c", "bl_journal_place"): {
        ("journal->added - journal->seen >= journal->room", 0, "true"): (
            "reads for every change how far the reader is, which costs time"
        ),
        ("ahead < journal->room", 0, "true"): "only which line is fetched early differs",
        ("ahead < journal->room", 0, "false"): "only which line is fetched early differs",
    },
    ("index/journal.c", "bl_journal_removed"): {
        ("block->named", 0, "true"): "readers look for a generation that they do not have",
    },
    ("index/journal.c", "bl_journal_take"): {
        ("first < part", 0, "false"): "the sum modulo the room is the same place",
    },
    ("index/journal.c", "bl_names_look"): {
        ("bl_table_whole(&entry, number)", 0, "true"): (
            "only the entry's state, a flag and its generation are used, and the name's line is "
            "whole and has that generation"
        ),
        ("entry.flags & BL_ENTRY_NAMED", 0, "true"): (
            "the line of a block without a name has another generation"
        ),
        ("entry.state != BL_ENTRY_COMMITTED", 0, "false"): (
            "no entry of another state has the flag of a name"
        ),
    },
    ("index/journal.c", "bl_names_guarded"): {
        ("(number - names->first) % BL_NAMES_BATCH == 0", 0, "true"): (
            "reads the lines behind this one from memory once more, which costs time"
        ),
    },
    ("index/tombstones.c", "bl_tombstones_take"): {
        ("tier", 1, "true"): "begins with the lists of number 0, which no tier has",
    },
    ("index/tombstones.c", "bl_tombstone_begins"): {
        ("tier < BL_TOMBSTONE_TIERS", 0, "true"): (
            "only counts parked removals as waiting: tests/tiers/test_removals.py"
        ),
    },
    ("index/tombstones.c", "bl_tombstones_of"): {
        (("index->blocks[n].lane < BL_TOMBSTONE_TIERS"), 0, ("true")): (
            "the bits of other tiers are masked out"
        ),
        (
            "bl_tombstones_count(index) == 0",
            0,
            "false",
        ): "looks for a tombstone that does not exist, which costs time",
    },
    ("index/tombstones.c", "bl_tombstones_tried"): {
        ("tombstone->state != BL_NUMBER_REMOVED", 0, "false"): (
            "a block has another generation, and a removed tombstone is not TAKEN"
        ),
    },
    ("index/table.c", "bl_entry_write"): {
        ("block->named", 0, "true"): "the line of a block without a name has another generation",
    },
    ("index/recover.c", "bl_recover_name"): {
        ("line.generation == generation", 0, "true"): (
            "copies the name of another generation, which readers ignore"
        ),
        ("*fetched <= first", 0, "true"): (
            "reads a batch of lines from memory once more, which costs time"
        ),
    },
    ("index/grant.c", "bl_commit_items"): {
        (("items != NULL"), 0, ("true")): (
            "a request without items is refused nevertheless: the pointer stays NULL"
        ),
    },
    ("index/grant.c", "bl_commit_one"): {
        ("block->named", 0, "true"): "a repeated commit has a name only if the first one had it",
        ("block->named", 1, "true"): "writes a line of the name table that no entry points to",
    },
    ("index/grant.c", "bl_handle_commit"): {
        ("retained", 0, "true"): _LOOKED,
        ("index->blocks[commit.block].task != 0", 0, "true"): _LOOKED,
        ("status < 0", 0, "false"): _STATE,
        ("status < 0", 0, "true"): _STATE,
        ("status == 0", 1, "true"): _UNREAD,
        (
            "block && block->state == BL_NUMBER_COMMITTED && block->pin_count == 0",
            0,
            "false",
        ): "blocks are evicted in another order: tests/index/test_block_calls.py checks it",
        ("block->pin_count == 0", 0, "true"): (
            "a commit that is repeated makes a pinned block evictable, which is rare in scenarios: "
            "tests/index/test_block_calls.py repeats one"
        ),
    },
    ("index/grant.c", "bl_handle_reserve"): {
        ("head.flags & BL_RESERVE_KEPT", 0, "true"): (
            "looks for tasks that have timed out once more than necessary"
        ),
        ("i % BL_GROUP_KEYS == 0", 0, "true"): "prefetches memory once more, which is a hint",
        ("status == 0", 0, "true"): _UNREAD,
    },
    ("index/grant.c", "bl_reuse_check"): {
        ("!index->reused", 0, "false"): (
            "reads the epoch though no space was reused, which costs time"
        ),
    },
    ("rpc/housekeeping.c", "bl_housekeeping_end"): {
        ("end == BL_END_GONE", 0, "true"): (
            "a session ends suspect only where this host has no lock of it: there is none to remove"
        ),
        ("server->pidfds", 0, "true"): _LIFE,
    },
    ("rpc/housekeeping.c", "bl_housekeeping_keep"): {
        (
            "now_ns - server->housekeeping_ns < (bl_server_asleep(server) ? "
            "BL_HOUSEKEEPING_ASLEEP_NS : BL_HOUSEKEEPING_PERIOD_NS)",
            0,
            "false",
        ): _PERIOD,
        ("bl_server_asleep(server)", 0, "false"): _PERIOD,
        ("bl_server_asleep(server)", 0, "true"): (
            "housekeeping is done as rarely as while the server sleeps, which costs time"
        ),
        ("now_ns - server->liveness_ns < BL_LIVENESS_PERIOD_NS", 0, "false"): _PERIOD,
        ("now_ns - server->sweep_ns > BL_SWEEP_PERIOD_NS", 0, "true"): _PERIOD,
        ("status < 0", 0, "false"): "the check that follows returns the same error",
    },
    ("rpc/housekeeping.c", "bl_housekeeping_reap"): {
        ("server->pidfds", 0, "true"): _LIFE,
    },
    ("rpc/housekeeping.c", "bl_housekeeping_sweep"): {
        ("count <= 0", 0, "false"): (
            "checks the lobby and the epoch though no lock is left to remove, which costs time"
        ),
    },
    ("rpc/housekeeping.c", "bl_housekeeping_watch"): {
        ("left", 0, "true"): (
            "reports to the simulator's oracle a heartbeat that no code relies on, which can only "
            "make it stricter"
        ),
        ("lane->state == BL_SESSION_FREE", 0, "false"): (
            "a free lane has no lock and is not LIVE, so it is skipped in any case"
        ),
    },
    ("rpc/housekeeping.c", "bl_lane_has_devices"): {
        ("bl_lane_here(server, lane)", 0, "true"): (
            "flushes for another host's session, too, which costs time"
        ),
        ("lane->liveness_lock < 0", 0, "false"): (
            "a lock that is not open has no size, and counts as one with devices in any case"
        ),
    },
    ("rpc/housekeeping.c", "bl_lane_over"): {
        ("!inherited", 0, "true"): (
            "this server granted nothing to an inherited session, so there is nothing to release "
            "at its end"
        ),
        ("bl_lane_has_devices(server, number)", 0, "true"): _FLUSH,
        ("end == BL_END_GONE", 1, "true"): _SUSPECT,
        ("end == BL_END_GONE", 2, "true"): _SUSPECT,
        ("lane->state == BL_SESSION_LIVE", 0, "true"): (
            "a lane that is not LIVE is not in the list that it would be removed from"
        ),
    },
    ("rpc/housekeeping.c", "bl_lane_watched"): {
        ("lane->state != BL_SESSION_FREE", 0, "true"): (
            "drops a free lane's heartbeat from the cache, which costs time: "
            "bl_housekeeping_watch() skips the lane"
        ),
    },
    ("rpc/housekeeping.c", "bl_lobby_give"): {
        ("server->lanes[known].state == BL_SESSION_LIVE", 0, "true"): (
            "the client gets the lane that it had under an earlier server, which is suspect: it "
            "reads this in the session's line, detaches, and attaches again, which costs time"
        ),
        ("bl_lane_free(server) < 0", 0, "true"): _PERIOD,
        ("here", 1, "false"): (
            "without its lock a session of this host ends when its heartbeat stops: later, and as "
            "suspect"
        ),
        ("here", 1, "true"): "another host's session has no lock here, so there is none to watch",
        ("known >= 0", 0, "true"): (
            "reads lanes[-1], outside of the table, which only a sanitizer detects; its state "
            "matches no state of a session"
        ),
        ("request->old_nonce", 0, "true"): "no session has the nonce 0, so no lane is found",
        (
            "status < 0",
            0,
            "false",
        ): "the check after the new session line returns the same error",
    },
    ("rpc/housekeeping.c", "bl_lobby_look"): {
        ("request.operation == BL_LOBBY_DETACH", 0, "false"): (
            "a request to detach that was sent to an earlier server stays unanswered: the final "
            "value of the heartbeat, which was written before, has the same meaning"
        ),
        ("request.sequence == request.sequence_end", 0, "true"): _PIECE,
    },
    ("rpc/housekeeping.c", "bl_lobby_serve"): {
        ("lane < 0", 0, "true"): _LIFE,
        ("lane < 0", 2, "false"): "the lane in an error reply is not read",
        ("lane == -BL_ERROR_DEPOSED", 0, "false"): (
            "the client gets the error that its server is deposed, and sends the request again as "
            "if it had detected that itself"
        ),
        ("server->pidfds", 0, "true"): _LIFE,
    },
    ("kvcache/put.c", "bl_kv_commit"): {
        ("work->count > 0", 0, "true"): "sends the server a commit of nothing, which costs a call",
    },
    ("kvcache/put.c", "bl_kv_publish"): {
        ("session->nonce == work->nonce", 0, "true"): _ENDED,
        ("session->attached", 0, "true"): (
            "an abort by the next session is refused: the grants are not its own"
        ),
        ("status < 0", 0, "true"): (
            "an abort of committed blocks, or by an ended session, is refused"
        ),
        ("work->count > 0", 0, "true"): "sends the server an abort of nothing, which costs a call",
    },
    ("kvcache/batch.c", "bl_kv_retire"): {
        ("status == -BL_ERROR_DEVICE_FAULT", 0, "true"): (
            "where no device failed there is no offset either"
        ),
    },
    ("kvcache/get.c", "bl_kv_get_begin"): {
        ("status < 0", 1, "true"): (
            "releases the pins before the copy: a block that is evicted meanwhile is a miss at the"
            " second check, and the release after it finds nothing"
        ),
        ("hits > 0", 0, "true"): "reads no entry, which costs two fences",
    },
    ("kvcache/get.c", "bl_kv_get_end"): {
        ("work->count > 0", 0, "true"): ("reads no entry, and the epoch once, which costs time"),
    },
    ("kvcache/get.c", "bl_kv_look_guarded"): {
        ("!batch->check_checksums", 0, "false"): (
            "reads checksums that the engine then does not use; a damaged vector causes a miss, "
            "never wrong bytes"
        ),
    },
    ("kvcache/put.c", "bl_kv_checksums_guarded"): {
        ("work->chunk_count > 0", 0, "true"): "copies no bytes where there are no checksums",
    },
    ("kvcache/get.c", "bl_entry_agrees"): {
        ("bl_table_whole(entry, record->block)", 0, "true"): (
            "compares every field that is used except the checksum, and bytes that do not match "
            "the checksum are a miss"
        ),
        ("agrees", 0, "true"): _ANN,
    },
    ("kvcache/get.c", "bl_kv_block_threads"): {
        ("batch->length >= 2 * part", 0, "true"): _THREADS,
        ("size < part", 0, "false"): _THREADS,
    },
    ("kvcache/get.c", "bl_kv_confirm"): {
        ("batch->check_checksums", 0, "false"): _ANN,
        ("batch->check_checksums", 0, "true"): _ANN,
    },
    ("kvcache/get.c", "bl_kv_get"): {
        ("status == 0", 0, "true"): (
            "a get whose request failed has no hits: nothing is read or released, and the error is"
            " returned"
        ),
        ("work.count > 0", 0, "true"): ("reads no block, and the epoch once, which costs time"),
    },
    ("kvcache/get.c", "bl_kv_hit_read"): {
        ("worker > 0", 0, "true"): _THREADS,
        ("last", 0, "true"): _THREADS,
        ("read->threads > 1", 0, "true"): _THREADS,
        ("own.status == -EBADMSG", 0, "false"): _COUNTED,
        ("own.status == -EBADMSG", 0, "true"): _COUNTED,
    },
    ("kvcache/get.c", "bl_kv_hits_guarded"): {
        ("threads < BL_THREAD_POOL_WORKERS", 0, "false"): _THREADS,
    },
    ("kvcache/get.c", "bl_kv_read"): {
        ("throttle != NULL", 0, "false"): _LINK,
        ("throttle != NULL", 0, "true"): _LINK,
    },
    ("kvcache/get.c", "bl_checksums_read"): {
        (
            "bl_checksums_crc(work->checksums, work->chunk_count) == entry->checksums_crc",
            0,
            "true",
        ): _VECTOR,
    },
    ("kvcache/get.c", "bl_kv_read_guarded"): {
        ("status < 0", 0, "false"): _VECTOR,
        ("batch->check_checksums", 0, "true"): _CHECKED,
        ("check", 0, "true"): _CHECKED,
        ("work->chunk_count > 0", 0, "true"): (
            "checks blocks that have no checksums: the vector is empty, and so is its check"
        ),
    },
    ("kvcache/get.c", "bl_kv_release"): {
        ("read == 0", 0, "true"): "the states that a failed get leaves are not read",
        ("work->count < batch->count", 0, "true"): (
            "writes a state after that of the last key, which only a sanitizer detects"
        ),
        ("work->count > 0", 0, "true"): "sends the server a release of nothing, which costs a call",
    },
    ("rpc/lane.c", "bl_bulk_send"): {
        ("size > whole", 0, "true"): (
            "one more line of zeros after the request, in an area that no request of the simulator"
            " fills"
        ),
        ("whole > 0", 0, "true"): "streams no bytes",
    },
    ("rpc/lane.c", "bl_lane_call"): {
        ("message->request_size <= BL_MESSAGE_INLINE_SIZE", 0, "false"): (
            "a short request goes through the bulk area like a long one, which costs time"
        ),
        (("taken == 0"), 0, ("true")): (
            "the call has timed out then, which the caller detects before it tries again"
        ),
    },
    ("rpc/lane.c", "bl_lane_send"): {
        ("size == 0", 0, "false"): _NO_BYTES,
    },
    ("rpc/lane.c", "bl_lane_take"): {
        ("session->window < waiting", 0, "false"): _WINDOW,
        ("session->window < waiting", 0, "true"): _WINDOW,
        ("taken == window", 0, "false"): _WINDOW,
        ("taken == window", 0, "true"): _WINDOW,
        ("window * 2 < BL_WINDOW_MAX", 0, "false"): _WINDOW,
        ("window < count", 0, "false"): _WINDOW,
        ("window < count", 0, "true"): (
            "a client that waits for one reply has sent one request, so only one reply can arrive"
        ),
    },
    ("rpc/lane.c", "bl_lane_wait"): {
        ("rung", 0, "true"): _RINGS,
        ("!rung", 0, "true"): _RINGS,
        ("!woken", 0, "true"): _RINGS,
        ("bl_waker_asleep(&session->waker)", 0, "true"): _RINGS,
        ("asleep", 1, "true"): _RINGS,
        ("asleep", 0, "false"): "rings only after ring_ns of waiting, which costs time",
        ("wait->waited_ns - looked > BL_EPOCH_LOOK_NS", 0, "true"): (
            "reads the epoch in every iteration, which costs time"
        ),
    },
    ("rpc/lane.c", "bl_session_stale"): {
        ("!bl_epoch_serving(&epoch)", 0, "false"): (
            "waits for a server that has stopped until the timeout, or until another epoch is "
            "published"
        ),
    },
    ("rpc/lobby.c", "bl_lobby_attach"): {
        ("status == 0", 0, "true"): (
            "only which error a failed attempt returns differs: BAD_REPLY, if the last reply names"
            " no lane"
        ),
        ("lock >= 0", 0, "true"): _CLOSED,
        ("session->devices", 0, "true"): _FLUSH,
        ("status < 0", 0, "true"): (
            "after an answer nothing is open, and the lock of an attached session is not released "
            "here"
        ),
    },
    ("rpc/lobby.c", "bl_lobby_clash"): {
        ("bl_lobby_reply_read(session, epoch->epoch % BL_HALF_COUNT, &reply)", 0, "true"): (
            "a client that takes a torn reply for a clash reads it again until the timeout, and by"
            " then it is whole"
        ),
        ("reply.boot_id[1] != session->boot_id[1]", 0, "false"): (
            "boot ids are random in both words: either comparison is sufficient"
        ),
    },
    ("rpc/lobby.c", "bl_lobby_exchange"): {
        ("serving", 3, "true"): _RINGS,
        ("!turn->rung", 0, "true"): _RINGS,
        ("bl_waker_asleep(&session->waker)", 0, "true"): _RINGS,
        ("reply->epoch == target", 0, "true"): (
            "each epoch gets a request with a sequence of its own, and of the servers of one half "
            "only the last one writes: a reply to that sequence there is from the server of that "
            "epoch"
        ),
        ("turn->operation == BL_LOBBY_ATTACH", 0, "true"): (
            "sends the server a process for a session that this request ends"
        ),
        ("bl_epoch_serving(&epoch)", 0, "true"): _NOT_SERVING,
        (("serving"), 0, ("true")): (
            "only which error is returned when no server of this host serves differs"
        ),
        ("serving", 1, "true"): _NOT_SERVING,
        ("serving", 2, "true"): (
            "an answer is valid no matter which server serves since then: the epoch in it is "
            "checked"
        ),
        ("serving", 4, "false"): "only which error is returned at the timeout differs",
    },
    ("rpc/lobby.c", "bl_lobby_reply_read"): {
        ("out->sequence == out->sequence_end", 0, "true"): _PIECE,
    },
    ("index/lookup.c", "bl_lookup_deferred"): {
        ("neighbors >= 0 && neighbors < count", 0, "false"): "prefetches less, which costs time",
    },
    ("index/lookup.c", "bl_lookup_find"): {
        ("number < 0", 0, "false"): "prefetches memory of no block, which is a hint",
    },
    ("index/reclaim.c", "bl_evict_ahead"): {
        ("next < 0", 0, "false"): "prefetches memory for the key of no block, which is a hint",
        ("later < 0", 0, "false"): "prefetches memory of no block, which is a hint",
    },
    ("pool/message.h", "bl_reply_whole"): {
        ("reply->sequence == reply->sequence_end", 0, "true"): _PIECE,
    },
    ("pool/message.h", "bl_request_whole"): {
        ("request->sequence == request->sequence_end", 0, "true"): _PIECE,
    },
    ("index/index.c", "bl_index_ended"): {
        ("bl_lane_has_devices(index->server, lane)", 0, "true"): _FLUSH,
        ("end == BL_END_GONE", 0, "true"): _FLUSH,
    },
    ("index/index.c", "bl_index_settled"): {
        ("index->server->inherited_devices", 0, "true"): _FLUSH,
    },
    ("index/recover.c", "bl_recover"): {
        ("old_epoch == 0", 0, "false"): (
            "the half of a pool that no server has used is empty: nothing is recovered from it"
        ),
    },
    ("index/recover.c", "bl_recover_prefault"): {
        ("!bl_table_milestone(line)", 0, "false"): "prefaults each line, which costs time",
    },
    ("index/recover.c", "bl_recover_entries"): {
        ("index->blocks[number].named", 0, "true"): (
            "copies the line of a block without a name, which is never read"
        ),
        ("!whole", 0, "false"): "counts for statistics, which no decision depends on",
        ("entry.state == BL_ENTRY_COMMITTED", 0, "true"): (
            "a free entry has no bytes, so bl_entry_invalid() refuses it"
        ),
        ("whole", 0, "true"): _ANN,
    },
    ("index/recover.c", "bl_recover_extents"): {
        ("stripe < taken", 0, "false"): (
            "bl_extents_adopt() refuses a mark whose stripes are taken"
        ),
    },
    ("index/recover.c", "bl_recover_mark"): {
        ("whole", 0, "true"): _ANN,
        ("whole", 1, "true"): (
            "a damaged mark is used as if it were whole: bl_extents_adopt() checks its fields"
        ),
    },
    ("index/recover.c", "bl_scan_refetch"): {
        ("line % BL_SCAN_LINES != 0", 0, "false"): _WIDE,
        ("line_count - line < BL_SCAN_LINES", 0, "false"): _WIDE,
    },
    ("index/recover_sort.h", "bl_recovered_sort"): {
        ("!in_order", 0, "true"): _SORTED,
        ("(differ >> shift & (BL_RADIX - 1)) == 0", 0, "false"): _SORTED,
    },
    ("pool/register.h", "bl_register_load"): {
        ("bl_line_used(first)", 0, "true"): (
            "a line of zeros is read a second time, which costs time"
        ),
    },
    ("pool/register.h", "bl_register_read"): {
        ("first_ever < 2", 0, "true"): _REREAD,
        ("status < 0", 0, "true"): _REREAD,
        ("tries > 0", 0, "true"): "pauses before the first read, which costs time",
    },
    ("pool/register.h", "bl_register_settled"): {
        ("memcmp(copies[0], line, sizeof copies[0]) == 0", 0, "true"): (
            "the second copy is written after the first: if it has the final value, so has the "
            "first, or a successor, which needed that value, writes it again"
        ),
    },
    ("rpc/server.c", "bl_idle_nap_ns"): {
        ("idle_ns < BL_IDLE_YIELD_NS", 0, "false"): _NAP,
        ("server->pool->one_host", 0, "false"): _NAP,
        ("server->pool->one_host", 0, "true"): _NAP,
        ("server->sleeper", 0, "false"): _NAP,
        ("server->sleeper", 0, "true"): _NAP,
    },
    ("rpc/server.c", "bl_server_rest"): {
        ("nap_ns == 0 && !bl_core_taken(&server->core, bl_now_ns(memory))", 0, "false"): _NAP,
        ("server->pidfds", 0, "true"): _LIFE,
    },
    ("rpc/server.c", "bl_lane_answer"): {
        ("server->quota.calls_per_s", 0, "true"): "an allowance of 0 is refilled with 0",
    },
    ("rpc/server.c", "bl_lane_gather"): {
        ("ready == lane->window", 0, "false"): _WINDOW,
        ("window < BL_QUANTUM_REQUESTS", 0, "false"): _WINDOW,
    },
    ("rpc/server.c", "bl_server_handle"): {
        ("status == 0", 0, "true"): "only which error a bad request gets differs",
    },
    ("rpc/server.c", "bl_server_loop"): {
        ("server->core.crowded", 0, "true"): "yields in each idle round, which costs time",
        ("served == 0", 0, "true"): "yields in each round on a shared core, which costs time",
        ("busy == 0 && idle_ns >= BL_IDLE_SPIN_NS", 0, "false"): _NAP,
        ("bl_server_rest(server, idle_ns)", 0, "false"): (
            "a server that was woken does its housekeeping before it polls lanes"
        ),
        ("++rounds % BL_ROUNDS_PER_CLOCK", 0, "false"): _NAP,
        ("busy == 0", 0, "true"): _NAP,
        ("busy > 0", 0, "true"): _NAP,
        ("idle_ns >= BL_IDLE_SPIN_NS", 0, "true"): _NAP,
    },
    ("rpc/server.c", "bl_server_mend"): {
        ("server->lanes[i].state == BL_SESSION_LIVE", 1, "true"): (
            "a broken lane that is not LIVE has no owner afterwards, whether it is FREE or "
            "SUSPECT, and no memory of the simulator fails"
        ),
    },
    ("rpc/server.c", "bl_lane_turn"): {
        ("turn.requests == 0", 0, "false"): (
            "a lane without requests takes an empty turn, which costs time"
        ),
    },
    ("rpc/doorbell.c", "bl_doorbell_due"): {
        ("server->quiet_hosts == 0", 0, "false"): "returns no host in that case, either",
        (
            "++server->doorbell_rounds < BL_DOORBELL_ROUNDS && server->done.requests - "
            "server->doorbell_done.requests < BL_DOORBELL_REQUESTS && server->done.keys - "
            "server->doorbell_done.keys < BL_DOORBELL_KEYS",
            0,
            "false",
        ): "polls the doorbells in each round, which costs time",
        (
            "server->done.requests - server->doorbell_done.requests < BL_DOORBELL_REQUESTS",
            0,
            "true",
        ): _RUNG,
        ("server->done.keys - server->doorbell_done.keys < BL_DOORBELL_KEYS", 0, "true"): _RUNG,
    },
    ("rpc/doorbell.c", "bl_doorbell_quieten"): {
        ("lane->next != lane->busy_next", 0, "false"): (
            "a lane with requests becomes quiet, and its client rings, which costs time"
        ),
        ("now_ns - lane->busy_ns > quiet_ns", 0, "false"): (
            "lanes without requests are polled in each round, too, which costs time"
        ),
    },
    ("rpc/server.c", "bl_server_round"): {
        ("bl_lane_turn(server, number)", 0, "false"): _ORDER,
        ("bl_lane_turn(server, number)", 0, "true"): _ORDER,
        ("bl_doorbell_look(server, hosts)", 0, "true"): (
            "invalidates the same lines more often, which costs time"
        ),
        ("server->round[0].requests != before && server->live_count > 1", 0, "false"): (
            "omits the fence after it, which is not needed: see its own exemption"
        ),
        ("server->live_count > 1", 0, "true"): _FENCED,
        ("server->round[0].requests != before", 0, "true"): _FENCED,
    },
    ("rpc/server.c", "bl_server_run"): {
        ("bl_is_fault(status)", 0, "true"): (
            "if no device has just failed, the last fault is in no lane, or in one that failed "
            "before"
        ),
    },
    ("rpc/session.c", "bl_session_attempt"): {
        ("bl_wait_left_ns(memory, &wait) == 0", 0, "false"): _LATE,
        ("status != -BL_ERROR_TIMEOUT", 0, "true"): (
            "a call that timed out is not sent again: the next condition ensures that"
        ),
        ("status == -BL_ERROR_TIMEOUT", 0, "false"): _LATE,
    },
    ("rpc/session.c", "bl_session_devices"): {
        ("!session->devices", 0, "true"): "makes a mark that exists already",
    },
    ("rpc/session.c", "bl_session_pump_all"): {
        ("batch > 0", 0, "true"): "fences for an empty batch, which costs time",
        ("pump->latencies_ns", 0, "true"): _CLOCK,
        ("pump->latencies_ns", 2, "true"): _CLOCK,
    },
    ("rpc/lobby.c", "bl_session_rest"): {
        ("session->devices", 0, "true"): "removes a mark that was not made",
    },
    ("rpc/standby.c", "bl_server_watch"): {
        (
            "(status = bl_guarded(memory, bl_watch_look_guarded, &look)) == 0",
            0,
            "true",
        ): "checks until the caller's timeout, and returns the result of the last check",
        ("status != 0", 0, "true"): (
            "only when a takeover is tried differs: takeover.c decides whether it is allowed"
        ),
    },
    ("rpc/standby.c", "bl_watch_begin"): {
        (
            "bl_boot_same(line->boot_id, server->boot_id)",
            0,
            "true",
        ): "another host's server has no lock here, so there is nothing to watch",
    },
    ("rpc/standby.c", "bl_watch_look_guarded"): {
        (
            "server->watch.liveness_lock >= 0 && "
            "bl_liveness_gone(memory, server->watch.liveness_lock)",
            0,
            "false",
        ): (
            "a server that is proven gone is succeeded only after its heartbeat has stood still, "
            "which costs time"
        ),
        ("bl_epoch_last_word(&line)", 0, "false"): (
            "a server that announced its stop is succeeded only after its heartbeat has stood "
            "still, which costs time"
        ),
        ("line.epoch == 0", 0, "false"): (
            "a server that does not serve is found silent a little later, and then a takeover is "
            "tried nevertheless"
        ),
        ("line.nonce != server->watch.nonce", 0, "true"): (
            "the watch of the same server restarts at every check: its heartbeat seems to have "
            "just moved"
        ),
    },
    ("rpc/takeover.c", "bl_epoch_gone"): {
        ("line->epoch == 0", 0, "false"): (
            "epoch 0 has no server, and the search for its lock finds nothing"
        ),
    },
    ("rpc/takeover.c", "bl_server_gone"): {
        (
            "liveness_lock >= 0",
            0,
            "true",
        ): "a missing lock file cannot be locked, so bl_liveness_gone() returns false",
    },
    ("rpc/takeover.c", "bl_takeover_claim"): {
        ("next > plan->epoch", 0, "true"): (
            "a past epoch is tried first, which costs an election: its candidates are gone, or the"
            " election reports that it is too late"
        ),
    },
    ("rpc/takeover.c", "bl_takeover_follow"): {
        ("line->nonce != server->silence.nonce", 0, "true"): (
            "the heartbeat of a silent server is watched once more, which costs time"
        ),
        ("gone < 0", 0, "true"): _NEGATIVE,
    },
    ("rpc/takeover.c", "bl_takeover_inherit"): {
        ("earlier", 0, "false"): (
            "only that a session is of an earlier epoch is used, not which one"
        ),
        ("inherits", 1, "true"): (
            "if no server ever served, no session line was written: it is zero, so it has no nonce"
        ),
        ("inherits", 0, "true"): (
            "reports to the simulator's oracle a line that no code relies on, which can only make "
            "it stricter"
        ),
    },
    ("rpc/takeover.c", "bl_takeover_leave"): {
        ("server->pidfds", 0, "true"): _LIFE,
        ("server->sleeper", 0, "true"): "the simulator has nothing to close there",
    },
    ("rpc/takeover.c", "bl_takeover_pass"): {
        ("plan->before.epoch != 0", 0, "true"): (
            "an empty line is repaired, or the sessions of no server are inherited: there are none"
        ),
    },
    ("rpc/takeover.c", "bl_takeover_plan"): {
        ("served", 0, "true"): (
            "only whether the source ever served is used, and a pool that no server has used has "
            "only zeros"
        ),
        ("gone < 0", 0, "true"): _NEGATIVE,
    },
    ("index/task_call.c", "bl_tasks_max"): {
        ("most < BL_TASKS_MAX", 0, "false"): (
            "no pool of the simulator has enough blocks to reach the limit"
        ),
    },
    ("index/task_client.c", "bl_task_call"): {
        ("size > 0", 0, "true"): _NO_BYTES,
    },
    ("rpc/quantum.h", "bl_quantum_keys"): {
        ("keys > 0", 0, "false"): _QUANTUM,
        ("request->flags & BL_MESSAGE_BULK", 0, "true"): _QUANTUM,
        ("size > sizeof(bl_block_request)", 0, "false"): _QUANTUM,
    },
    ("index/grant.c", "bl_grant_end"): {
        ("block->state == BL_NUMBER_GRANTED", 1, "true"): (
            "the space of a held block is free by then, and freeing it again is refused"
        ),
    },
    ("kvcache/put.c", "bl_kv_put_end"): {
        ("written < 0", 1, "true"): _FLUSH,
    },
    ("rpc/lane.c", "bl_session_given_up"): {
        ("line.nonce == session->nonce", 0, "true"): (
            "no other session gets the lane while the waiting one is alive; after an operator's "
            "false declaration the wait ends at its timeout"
        ),
    },
    ("rpc/lobby.c", "bl_lobby_settle"): {
        (
            "bl_epoch_read(session->pool, &epoch) == 0 && bl_lobby_reply_read(session, epoch.epoch "
            "% BL_HALF_COUNT, &reply) && reply.epoch == epoch.epoch && reply.sequence == "
            "line.sequence",
            0,
            "false",
        ): (
            "sends a request to detach again that was answered, and the answer stays valid: it "
            "costs a call"
        ),
        ("reply.epoch == epoch.epoch", 0, "true"): (
            "a server of an earlier epoch that answered the request had ended the session before "
            "its successor served"
        ),
        ("line.sequence == line.sequence_end", 0, "true"): _PIECE,
        ("bl_lobby_reply_read(session, epoch.epoch % BL_HALF_COUNT, &reply)", 0, "true"): (
            "a reply has this epoch and this sequence only if the current server has read the "
            "request"
        ),
    },
    ("rpc/lobby.c", "bl_lobby_detach"): {
        ("lock >= 0", 0, "true"): _CLOSED,
    },
    ("index/client.c", "bl_lookup"): {
        ("reply.count == part", 0, "false"): (
            "a server that answers with all of the keys also returns HIT"
        ),
    },
    ("index/client.c", "bl_reserve"): {
        ("session->attached", 0, "true"): _ENDED,
    },
    ("index/recover.c", "bl_recover_block"): {
        ("claimed", 0, "true"): (
            "returns nothing: an entry whose space cannot be claimed names no open space, and "
            "never that of another entry, because space gets a new owner only after the old entry "
            "is cleared (SYNC entry.reuse)"
        ),
    },
    ("index/lookup.c", "bl_remove_one"): {
        ("task", 0, "false"): (
            "tiers get a request to remove a task, which they never have: that costs time"
        ),
    },
    ("index/lookup.c", "bl_handle_remove"): {
        ("status == 0", 1, "true"): _UNREAD,
        ("status == 0", 0, "true"): ("a deposed server refuses the first key with another error"),
    },
    ("index/reclaim.c", "bl_block_place"): {
        ("index->share_count > 1", 0, "true"): (
            "counts for the only share, whose count is not read"
        ),
    },
    ("index/reclaim.c", "bl_extents_return"): {
        ("stripe <= last", 0, "true"): ("also checks the extents after it, which costs time"),
    },
    ("index/reclaim.c", "bl_space_open"): {
        ("stripe < 0", 0, "false"): ("reads the epoch though nothing was opened, which costs time"),
    },
    ("index/reclaim.c", "bl_space_take"): {
        ("status == 0", 0, "true"): ("a deposed server no longer grants space"),
    },
    ("index/stat.c", "bl_index_describe"): {
        ("out->data_bytes > taken", 0, "false"): (
            "only a figure differs: tests/admin/test_live.py"
        ),
    },
    ("kvcache/put.c", "bl_kv_flush"): {
        ("size - at < BL_PAGE_SIZE", 0, "false"): (
            "also flushes the rest of the block's last page, which costs time"
        ),
    },
    ("rpc/doorbell.c", "bl_doorbell_look"): {
        ("bl_doorbell_rouse(server, rung)", 0, "true"): _ROUSED,
        ("rung != 0", 0, "true"): _ROUSED,
        ("ring != server->doorbell[host]", 0, "true"): _ROUSED,
    },
    ("rpc/takeover.c", "bl_server_take"): {
        ("server->epoch != 0", 1, "true"): ("stops a heartbeat that was never started"),
    },
    ("index/reclaim.c", "bl_space_evict"): {
        ("bl_eviction_plain(index)", 0, "false"): (
            "with one share and no hints, the other path evicts the same blocks in the same order"
        ),
    },
}

# The failing Python test of each condition.
_LINES_ONCE = "tests/transfer/dsa/test_dsa_rules.py::test_threads_flush_each_line_of_a_plan_once"
_DAMAGED_EPOCH = (
    "tests/rpc/test_rpc_takeover.py::test_a_line_with_a_damaged_epoch_is_of_an_earlier_session"
)
TESTED: Conditions = {
    ("index/recover.c", "bl_recover_extents"): {
        (
            "bl_table_ends(memory, offset, bl_extent_line_offset(g, stripe, half), stripe)",
            0,
            "false",
        ): ("tests/index/test_takeover.py::test_a_restart_touches_the_used_part_of_the_tables"),
    },
    ("rpc/server.c", "bl_server_rest"): {
        ("nap_ns == 0", 0, "true"): (
            "tests/rpc/test_idle.py::test_an_idle_server_uses_little_of_a_core"
        ),
        ("!bl_core_taken(&server->core, bl_now_ns(memory))", 0, "true"): (
            "tests/rpc/test_idle.py"
            "::test_a_call_on_a_core_that_others_use_costs_less_than_their_time_slices"
        ),
    },
    ("rpc/server.c", "bl_server_loop"): {
        ("server->core.crowded && served == 0", 0, "false"): (
            "tests/rpc/test_idle.py::test_server_and_client_on_one_core_yield_to_each_other"
        ),
    },
    ("rpc/takeover.c", "bl_takeover_inherit"): {
        ("line.epoch != 0", 0, "true"): _DAMAGED_EPOCH,
        ("line.epoch < server->epoch", 0, "true"): _DAMAGED_EPOCH,
        ("earlier", 0, "true"): _DAMAGED_EPOCH,
    },
    ("index/recover.c", "bl_recover_block"): {
        (
            "bl_extents_cover(index->extents, first, "
            "bl_stripe_of(index, block->offset + size - 1) - first + 1)",
            0,
            "true",
        ): "tests/index/test_takeover.py::test_a_damaged_open_mark_only_affects_its_extent",
        ("!claimed", 0, "false"): (
            "tests/index/test_takeover.py::test_a_damaged_open_mark_only_affects_its_extent"
        ),
        ("!stays", 0, "true"): "tests/index/test_tasks.py::test_tasks_survive_server_restarts",
    },
    ("kvcache/get.c", "bl_entry_agrees"): {
        ("entry->state == BL_ENTRY_COMMITTED", 0, "true"): (
            "tests/hostile/test_lines.py::test_an_entry_of_another_block_is_a_miss"
        ),
        ("entry->generation == record->generation", 0, "true"): (
            "tests/hostile/test_lines.py::test_an_entry_of_another_block_is_a_miss"
        ),
    },
    ("index/grant.c", "bl_abort_one"): {
        ("block->lane != lane", 0, "false"): (
            "tests/index/test_block_calls.py::test_only_a_sessions_own_grants_can_be_committed_or"
            "_aborted"
        ),
        ("block->state != BL_NUMBER_GRANTED", 0, "false"): (
            "tests/index/test_block_calls.py::test_only_a_sessions_own_grants_can_be_committed_or"
            "_aborted"
        ),
    },
    ("index/grant.c", "bl_commit_block"): {
        ("commit->block >= index->pool->geometry.block_count_max", 0, "false"): (
            "tests/index/test_index_calls.py::test_a_block_number_of_another_session_has_no_effect"
        ),
        ("index->blocks[commit->block].generation != commit->generation", 0, "false"): (
            "tests/index/test_block_calls.py::test_an_old_grant_of_reused_space_is_invalid"
        ),
    },
    ("index/grant.c", "bl_commit_one"): {
        ("block->named && name->block_tokens != 0", 0, "false"): (
            "tests/index/test_names.py::test_a_repeated_commit_writes_the_name_again"
        ),
        ("block->named", 2, "true"): (
            "tests/index/test_names.py::test_the_journal_has_only_named_blocks"
        ),
        ("block == NULL", 0, "false"): (
            "tests/index/test_block_calls.py::test_an_old_grant_of_reused_space_is_invalid"
        ),
        ("block->lane != lane", 0, "false"): (
            "tests/index/test_block_calls.py::test_only_a_sessions_own_grants_can_be_committed_or"
            "_aborted"
        ),
        ("block->state != BL_NUMBER_GRANTED", 0, "false"): (
            "tests/index/test_block_calls.py::test_only_a_sessions_own_grants_can_be_committed_or"
            "_aborted"
        ),
        ("block->state == BL_NUMBER_COMMITTED", 0, "false"): (
            "tests/index/test_block_calls.py::test_a_commit_may_be_repeated"
        ),
    },
    ("index/grant.c", "bl_grant"): {
        ("bl_retained_full(index, stored)", 0, "true"): (
            "tests/index/test_tasks.py::test_each_task_is_delivered_to_one_worker_in_order"
        ),
        ("head->flags & BL_RESERVE_KEPT", 0, "true"): (
            "tests/index/test_tasks.py::test_tasks_cannot_fill_the_pool"
        ),
        ("number < 0", 0, "false"): (
            "tests/index/test_block_calls.py::test_the_table_takes_as_many_blocks_as_it_has_lines"
        ),
    },
    ("index/grant.c", "bl_grant_refused"): {
        ("!bl_hold_full(index, lane, length)", 0, "true"): (
            "tests/index/test_operate.py::test_bytes_count_grants_and_pinned_blocks"
        ),
        ("index->holds[lane].grant_count < most", 0, "false"): (
            "tests/index/test_operate.py::test_grants_beyond_the_quota_are_refused_until_some_end"
        ),
        ("most == 0", 0, "false"): (
            "tests/index/test_block_calls.py::test_a_block_larger_than_the_pool_is_rejected_"
            "without_an_eviction"
        ),
        ("index->server->stat.draining", 0, "false"): (
            "tests/index/test_operate.py::test_a_drained_pool_rejects_new_blocks_and_serves_other_"
            "calls"
        ),
    },
    ("index/grant.c", "bl_handle_commit"): {
        ("items == NULL", 0, "false"): (
            "tests/index/test_index_calls.py::test_a_count_that_does_not_match_the_bytes_is_refused"
        ),
        ("status == 0", 0, "true"): (
            "tests/index/test_index_calls.py::test_a_block_number_of_another_session_has_no_effect"
        ),
    },
    ("index/grant.c", "bl_handle_reserve"): {
        ("head.length == 0", 0, "false"): (
            "tests/index/test_block_calls.py::test_invalid_sizes_are_rejected"
        ),
        ("keys == NULL", 0, "false"): (
            "tests/index/test_index_calls.py::test_a_count_that_does_not_match_the_bytes_is_refused"
        ),
    },
    ("index/grant.c", "bl_reserve_one"): {
        ("committed", 0, "false"): (
            "tests/index/test_block_calls.py::test_a_granted_key_is_pending_for_all_clients"
        ),
        ("committed", 0, "true"): (
            "tests/index/test_block_calls.py::test_a_granted_key_is_pending_for_all_clients"
        ),
        ("number < 0", 0, "false"): (
            "tests/index/test_operate.py::test_grants_beyond_the_quota_are_refused_until_some_end"
        ),
        ("number < 0", 1, "true"): (
            "tests/index/test_block_calls.py::test_lookup_returns_the_leading_hits"
        ),
        ("number < 0", 2, "false"): (
            "tests/index/test_block_calls.py::test_a_block_larger_than_the_pool_is_rejected_"
            "without_an_eviction"
        ),
    },
    ("rpc/housekeeping.c", "bl_housekeeping_reap"): {
        ("(nonce = bl_pidfds_look(server->pidfds)) != 0", 0, "true"): (
            "tests/index/test_index_calls.py::test_a_count_that_does_not_match_the_bytes_is_refused"
        ),
        ("lane >= 0", 0, "true"): (
            "tests/rpc/test_processes.py::"
            "test_the_lane_of_a_dead_requester_is_released_after_a_stop"
        ),
    },
    ("rpc/housekeeping.c", "bl_housekeeping_watch"): {
        ("bl_lane_watched(&server->lanes[i])", 0, "true"): (
            "tests/crash/test_faults.py::test_a_memory_fault_in_one_lane_affects_only_that_lane"
        ),
        ("bl_error_passes(-lane->liveness_lock)", 0, "true"): (
            "tests/rpc/test_processes.py::test_a_successor_detects_deaths_that_it_could_not_check"
            "_at_once"
        ),
        (
            "lane->state == BL_SESSION_LIVE && now_ns - lane->heartbeat_seen_ns > "
            "bl_heartbeat_lost_ns(server)",
            0,
            "false",
        ): (
            "tests/crash/test_other_hosts.py::"
            "test_a_silent_session_is_quarantined_until_its_next_heart"
            "beat"
        ),
    },
    ("rpc/housekeeping.c", "bl_lane_over"): {
        ("end == BL_END_GONE && inherited && --server->inherited_count == 0", 0, "false"): (
            "tests/rpc/test_machines.py::test_a_grant_of_another_machine_is_kept_while_its_clie"
            "nt_has_a_heartbeat"
        ),
        (
            "!inherited",
            0,
            "false",
        ): "tests/index/test_tasks.py::test_only_the_claiming_session_can_complete_a_task",
    },
    ("rpc/housekeeping.c", "bl_lane_rebooted"): {
        ("lane->moved", 0, "true"): (
            "tests/rpc/test_machines.py::test_a_rebooted_machine_waits_and_is_admitted"
        ),
        ("lane->moved", 0, "false"): (
            "tests/rpc/test_machines.py::test_a_client_is_rejected_while_an_inherited_session_h"
            "as_a_heartbeat"
        ),
    },
    ("rpc/housekeeping.c", "bl_lane_watch"): {
        ("count <= lane->heartbeat_count", 0, "false"): (
            "tests/rpc/test_machines.py::test_a_session_of_an_earlier_boot_ends_when_its_hear"
            "tbeat_stops"
        ),
        ("lane->heartbeat_count != 0", 0, "true"): (
            "tests/rpc/test_machines.py::test_a_rebooted_machine_waits_and_is_admitted"
        ),
    },
    ("rpc/housekeeping.c", "bl_lobby_clash_check"): {
        ("status < 0", 0, "false"): (
            "tests/rpc/test_machines.py::test_a_client_is_rejected_while_an_inherited_session_h"
            "as_a_heartbeat"
        ),
        ("status == 0", 0, "true"): (
            "tests/rpc/test_machines.py::test_a_client_is_rejected_while_an_inherited_session_h"
            "as_a_heartbeat"
        ),
    },
    ("rpc/housekeeping.c", "bl_lobby_give"): {
        ("here", 0, "true"): (
            "tests/rpc/test_machines.py::test_a_client_of_another_machine_is_refused_by_the_server"
        ),
        ("old >= 0", 0, "false"): (
            "tests/rpc/test_server.py::test_a_client_follows_to_the_next_server"
        ),
        ("request->old_nonce", 0, "false"): (
            "tests/rpc/test_server.py::test_a_client_follows_to_the_next_server"
        ),
        ("status < 0", 1, "false"): (
            "tests/rpc/test_machines.py::test_another_machine_is_refused_while_a_client_has"
            "_its_number"
        ),
    },
    ("rpc/housekeeping.c", "bl_lobby_look"): {
        ("request.host != host", 0, "false"): (
            "tests/hostile/test_lines.py::test_arbitrary_requests_of_one_host_do_not_affect_others"
        ),
    },
    ("kvcache/put.c", "bl_kv_publish"): {
        (
            "status < 0 && work->count > 0 && session->attached && session->nonce == work->nonce",
            0,
            "false",
        ): ("tests/kvcache/test_engine_copy.py::test_grants_of_a_failed_write_are_released"),
        ("work->statuses[k] < 0", 0, "true"): (
            "tests/index/test_tasks.py::test_only_the_claiming_session_can_complete_a_task"
        ),
    },
    ("kvcache/put.c", "bl_kv_put"): {
        ("status == 0", 0, "true"): (
            "tests/kvcache/test_cache.py::test_without_a_server_calls_raise_and_a_get_is_not_a_miss"
        ),
    },
    ("kvcache/put.c", "bl_kv_reserve"): {
        ("status < 0", 0, "false"): (
            "tests/kvcache/test_cache.py::test_without_a_server_calls_raise_and_a_get_is_not_a_miss"
        ),
    },
    ("kvcache/put.c", "bl_checksums_write"): {
        ("work->chunk_count > 1", 0, "true"): (
            "tests/kvcache/test_cache.py::test_a_block_that_fills_its_space_leaves_the_next_o"
            "ne_alone"
        ),
    },
    ("rpc/lane.c", "bl_reply_decode"): {
        ("bulk.size > g->bulk_size", 0, "false"): (
            "tests/hostile/test_replies.py::test_bytes_that_change_during_a_copy_match_the_checksum"
            "_or_are_an_error"
        ),
        ("reply->size > BL_MESSAGE_INLINE_SIZE", 0, "false"): (
            "tests/hostile/test_replies.py::test_any_valid_line_decodes_to_a_reply_or_an_error"
        ),
    },
    ("rpc/lobby.c", "bl_lobby_attach"): {
        ("lock < 0", 0, "false"): (
            "tests/rpc/test_processes.py::"
            "test_a_stopped_process_that_attaches_delays_others_only_brie"
            "fly"
        ),
        ("session->attached", 0, "true"): (
            "tests/rpc/test_session.py::test_without_a_server_a_client_gets_an_error_at_once"
        ),
    },
    ("rpc/lobby.c", "bl_lobby_exchange"): {
        ("reply->nonce == turn->nonce", 0, "true"): (
            "tests/rpc/test_machines.py::test_a_reply_to_another_machine_assigns_no_lane"
        ),
        ("!bl_wait_turn(memory, turn->wait)", 0, "false"): (
            "tests/rpc/test_machines.py::test_a_client_is_refused_while_another_machine_has"
            "_its_number"
        ),
        ("bl_lobby_clash(session, &epoch)", 0, "false"): (
            "tests/rpc/test_machines.py::test_a_client_is_refused_while_another_machine_has"
            "_its_number"
        ),
        ("status == 0 && nobody && !session->old_nonce", 0, "false"): (
            "tests/rpc/test_session.py::test_without_a_server_a_client_gets_an_error_at_once"
        ),
        ("epoch.epoch != target", 0, "true"): (
            "tests/index/test_block_calls.py::test_a_block_larger_than_the_pool_is_rejected_"
            "without_an_eviction"
        ),
        ("epoch.epoch == 0", 0, "false"): (
            "tests/rpc/test_session.py::test_without_a_server_a_client_gets_an_error_at_once"
        ),
        ("epoch.state == BL_SERVER_STOPPED", 0, "false"): (
            "tests/rpc/test_session.py::test_a_stopped_server_is_an_error_at_once"
        ),
        ("serving", 4, "true"): "tests/rpc/test_server.py::test_a_call_without_a_server_ends",
    },
    ("rpc/lobby.c", "bl_lobby_lock"): {
        ("!bl_wait_turn(&session->pool->memory, wait)", 0, "false"): (
            "tests/rpc/test_processes.py::"
            "test_a_stopped_process_that_attaches_delays_others_only_brie"
            "fly"
        ),
    },
    ("index/reclaim.c", "bl_block_drop"): {
        ("block->pin_count == 0", 0, "false"): (
            "tests/index/test_block_calls.py::test_freed_space_can_hold_any_other_size"
        ),
    },
    ("index/lookup.c", "bl_handle_lookup"): {
        ("counts", 0, "true"): _UNCOUNTED,
        ("counts", 1, "true"): _UNCOUNTED,
        ("head.flags & BL_LOOKUP_PIN", 0, "true"): (
            "tests/index/test_block_calls.py::test_pinned_blocks_stay_and_released_ones_are_evicted"
        ),
        ("i == 0", 0, "true"): (
            "tests/index/test_operate.py::test_pins_beyond_the_quota_are_refused_until_some_are_"
            "released"
        ),
        ("keys == NULL", 0, "false"): (
            "tests/index/test_index_calls.py::test_a_count_that_does_not_match_the_bytes_is_refused"
        ),
    },
    ("transfer/cache_maintenance.c", "bl_maintenance_clip"): {
        ("job->start > at", 0, "true"): _LINES_ONCE,
        ("job->end > at", 0, "false"): _LINES_ONCE,
        ("until > before", 0, "false"): _LINES_ONCE,
    },
    ("transfer/cache_maintenance.c", "bl_maintenance_run"): {
        ("next.offset <= range.end", 0, "true"): (
            "tests/transfer/dsa/test_dsa_rules.py::test_a_plans_ranges_are_all_its_lines_"
            "and_no_more"
        ),
    },
    ("index/lookup.c", "bl_hit_record"): {
        ("block->pin_count == 0", 0, "true"): (
            "tests/index/test_block_calls.py::test_pinned_blocks_stay_and_released_ones_are_evicted"
        ),
    },
    ("index/lookup.c", "bl_handle_remove"): {
        ("keys == NULL", 0, "false"): (
            "tests/index/test_index_calls.py::test_a_count_that_does_not_match_the_bytes_is_refused"
        ),
    },
    ("index/lookup.c", "bl_lookup_chain"): {
        ("number < 0", 0, "false"): (
            "tests/rpc/test_fairness.py::test_a_victim_waits_for_one_quantum_of_each_other"
        ),
        ("number < 0", 1, "false"): (
            "tests/index/test_block_calls.py::test_lookup_returns_the_leading_hits"
        ),
        ("number < 0", 1, "true"): (
            "tests/index/test_block_calls.py::test_a_granted_key_is_pending_for_all_clients"
        ),
    },
    ("index/lookup.c", "bl_pin"): {
        ("bl_hold_full(index, lane, index->blocks[number].length)", 0, "false"): (
            "tests/index/test_operate.py::test_a_pin_of_too_many_bytes_is_a_quota_error"
        ),
        ("bl_pins_count(index->pins[lane]) > most", 0, "true"): (
            "tests/index/test_operate.py::test_pins_beyond_the_quota_are_refused_until_some_are_"
            "released"
        ),
        ("many", 0, "false"): (
            "tests/index/test_operate.py::test_pins_beyond_the_quota_are_refused_until_some_are_"
            "released"
        ),
        ("many", 1, "false"): (
            "tests/index/test_operate.py::test_pins_beyond_the_quota_are_refused_until_some_are_"
            "released"
        ),
        ("many", 1, "true"): (
            "tests/index/test_operate.py::test_a_pin_of_too_many_bytes_is_a_quota_error"
        ),
        ("index->blocks[number].pin_count++ == 0", 0, "true"): (
            "tests/index/test_block_calls.py::test_a_block_pinned_twice_needs_two_releases"
        ),
        ("pins == 1", 0, "true"): (
            "tests/index/test_operate.py::test_bytes_count_grants_and_pinned_blocks"
        ),
    },
    ("index/lookup.c", "bl_release_one"): {
        ("left < 0", 0, "false"): (
            "tests/index/test_index_calls.py::test_a_block_number_of_another_session_has_no_effect"
        ),
        ("left == 0", 0, "true"): (
            "tests/index/test_operate.py::test_bytes_count_grants_and_pinned_blocks"
        ),
    },
    ("index/lookup.c", "bl_remove_one"): {
        ("flags & BL_REMOVE_UNCLAIMED", 1, "true"): (
            "tests/index/test_block_calls.py"
            "::test_removed_blocks_are_missed_and_their_space_is_free"
        ),
        ("number < 0", 0, "false"): (
            "tests/index/test_check.py::test_a_pool_whose_server_changes_has_no_findings"
        ),
        (
            "(flags & BL_REMOVE_UNCLAIMED) && !bl_unclaimed(index, &index->blocks[number])",
            0,
            "false",
        ): ("tests/index/test_tasks.py::test_a_task_is_withdrawn_until_a_worker_claims_it"),
        ("!bl_unclaimed(index, &index->blocks[number])", 0, "true"): (
            "tests/index/test_tasks.py::test_a_task_is_withdrawn_until_a_worker_claims_it"
        ),
    },
    ("index/lookup.c", "bl_unclaimed"): {
        ("block->task != 0", 0, "true"): (
            "tests/index/test_tasks.py::test_a_block_that_is_not_a_task_is_not_withdrawn"
        ),
        (
            "bl_tasks_waits(index->tasks, block->task - 1, bl_now_ns(&index->pool->memory))",
            0,
            "true",
        ): ("tests/index/test_tasks.py::test_a_task_is_withdrawn_until_a_worker_claims_it"),
    },
    ("index/lookup.c", "bl_unpin"): {
        ("block->pin_count > 0", 0, "false"): (
            "tests/index/test_block_calls.py::test_a_block_pinned_twice_needs_two_releases"
        ),
        ("block->state == BL_NUMBER_COMMITTED", 0, "true"): (
            "tests/index/test_block_calls.py::test_a_removed_block_keeps_its_bytes_while_it_is"
            "_pinned"
        ),
    },
    ("index/client.c", "bl_lookup"): {
        ("!bl_record_sane(&session->pool->geometry, &records[hits + i])", 0, "false"): (
            "tests/hostile/test_replies.py::test_arbitrary_records_are_inside_the_pool_or_an_error"
        ),
        ("hits > 0", 0, "true"): (
            "tests/index/test_operate.py::test_pins_beyond_the_quota_are_refused_until_some_are_"
            "released"
        ),
    },
    ("index/client.c", "bl_index_call"): {
        ("reply->count > query->head.count", 0, "false"): (
            "tests/hostile/test_replies.py::test_arbitrary_records_are_inside_the_pool_or_an_error"
        ),
    },
    ("index/client.c", "bl_index_sum"): {
        ("status < 0", 0, "false"): (
            "tests/index/test_index_calls.py::test_every_call_reports_a_missing_server"
        ),
    },
    ("index/client.c", "bl_release_blocks"): {
        ("now < 0", 0, "false"): (_ANSWERLESS),
    },
    ("index/client.c", "bl_removal_nap"): {
        ("bl_now_ns(wait->memory) >= wait->until_ns", 0, "false"): (_REMOVAL_WAIT),
    },
    ("index/client.c", "bl_remove_blocks"): {
        ("status == 0", 0, "false"): (
            "tests/index/test_index_calls.py::test_a_removal_polls_until_the_disk_has_attempted_it"
        ),
        ("!bl_removal_nap(&wait)", 0, "false"): (_REMOVAL_WAIT),
    },
    ("index/client.c", "bl_reserve"): {
        ("done > 0", 0, "true"): (
            "tests/index/test_block_calls.py::test_a_block_larger_than_the_pool_is_rejected_"
            "without_an_eviction"
        ),
        ("session->nonce == nonce", 0, "true"): (
            "tests/hostile/test_replies.py::test_arbitrary_records_are_inside_the_pool_or_an_error"
        ),
        ("status < 0", 0, "false"): (
            "tests/hostile/test_replies.py::test_arbitrary_records_are_inside_the_pool_or_an_error"
        ),
    },
    ("index/client.c", "bl_reserve_undo"): {
        ("records[i].state == BL_BLOCK_GRANTED", 0, "true"): (
            "tests/hostile/test_replies.py::test_arbitrary_records_are_inside_the_pool_or_an_error"
        ),
    },
    ("index/reclaim.c", "bl_number_take"): {
        ("coldest < 0", 0, "false"): (
            "tests/index/test_block_calls.py::test_the_table_takes_as_many_blocks_as_it_has_lines"
        ),
    },
    ("index/recover.c", "bl_entry_invalid"): {
        ("entry->chunk_size < BL_LINE_SIZE", 0, "true"): (
            "tests/index/test_check.py::test_a_healthy_pool_has_no_findings"
        ),
    },
    ("index/recover.c", "bl_recover"): {
        ("suspect", 0, "false"): (
            "tests/index/test_takeover.py::test_grants_of_a_live_client_are_not_reassigned"
        ),
        ("suspect", 0, "true"): (
            "tests/index/test_takeover.py::test_every_committed_block_survives_kills_of_the_server"
        ),
    },
    ("index/recover.c", "bl_recover_entries"): {
        ("bl_table_ends(memory, offset, bl_entry_offset(g, number, half), number)", 0, "false"): (
            "tests/index/test_takeover.py::test_a_restart_touches_the_used_part_of_the_tables"
        ),
        ("whole", 2, "true"): ("tests/index/test_tasks.py::test_a_damaged_tombstone_is_dropped"),
        ("entry.state == BL_ENTRY_TIER", 0, "false"): (
            "tests/tiers/test_removals.py::test_a_removal_reaches_a_tier_that_the_server_lacks"
        ),
        ("bl_line_used((uint64_t *)&entry)", 0, "true"): (
            "tests/index/test_takeover.py::test_a_damaged_entry_is_dropped_and_counted"
        ),
        ("whole", 1, "true"): (
            "tests/index/test_takeover.py::test_a_damaged_entry_is_dropped_and_counted"
        ),
    },
    ("pool/register.h", "bl_register_read"): {
        ("tries < BL_REGISTER_TRIES", 0, "true"): (
            "tests/index/test_check.py::test_damaged_lines_are_recreated_and_cost_no_block"
        ),
    },
    ("rpc/server.c", "bl_bulk_take"): {
        ("bulk.size > server->pool->geometry.bulk_size", 0, "false"): (
            "tests/hostile/test_requests.py::test_a_field_out_of_range_is_an_error_to_its_sender"
        ),
        ("request->size != sizeof bulk", 0, "false"): (
            "tests/hostile/test_requests.py::test_a_field_out_of_range_is_an_error_to_its_sender"
        ),
    },
    ("rpc/server.c", "bl_lane_gather"): {
        ("window < BL_QUANTUM_REQUESTS", 0, "true"): (
            "tests/rpc/test_fairness.py::test_a_victim_waits_for_one_quantum_of_each_other"
        ),
    },
    ("rpc/server.c", "bl_server_describe"): {
        ("server->pidfds", 0, "false"): (
            "tests/rpc/test_processes.py::test_a_detached_session_is_no_longer_watched"
        ),
    },
    ("rpc/server.c", "bl_call_answer"): {
        ("status < 0", 0, "true"): (
            "tests/rpc/test_fairness.py::test_a_victim_waits_for_one_quantum_of_each_other"
        ),
    },
    ("rpc/server.c", "bl_server_handle"): {
        (
            "!bl_allowance_take(&server->lanes[lane].allowance, calls_per_s, request->method)",
            0,
            "true",
        ): ("tests/index/test_operate.py::test_calls_that_release_space_are_not_limited"),
        ("!server->handlers[request->method].run", 0, "false"): (
            "tests/hostile/test_replies.py::test_arbitrary_records_are_inside_the_pool_or_an_error"
        ),
        ("request->method >= BL_METHOD_COUNT", 0, "false"): (
            "tests/hostile/test_requests.py::test_a_field_out_of_range_is_an_error_to_its_sender"
        ),
        ("status == 0", 1, "true"): (
            "tests/hostile/test_requests.py::test_a_field_out_of_range_is_an_error_to_its_sender"
        ),
    },
    ("rpc/session.c", "bl_session_attempt"): {
        ("status == 0", 0, "true"): "tests/rpc/test_server.py::test_a_call_without_a_server_ends",
    },
    ("rpc/session.c", "bl_session_open"): {
        ("host >= BL_HOST_COUNT", 0, "false"): (
            "tests/rpc/test_session.py::test_an_invalid_host_number_is_rejected"
        ),
        ("madvise(session->parent, BL_PAGE_SIZE, MADV_WIPEONFORK) < 0", 0, "true"): (
            "tests/index/test_block_calls.py::test_a_block_larger_than_the_pool_is_rejected_"
            "without_an_eviction"
        ),
    },
    ("rpc/standby.c", "bl_watch_look_guarded"): {
        ("bl_error_passes(-server->watch.liveness_lock)", 0, "true"): (
            "tests/rpc/test_processes.py::test_a_standby_checks_again_without_more_descriptors"
        ),
        ("status == 1", 0, "true"): (
            "tests/rpc/test_machines.py::test_a_standby_that_observed_a_live_server_does_not_re"
            "place_it"
        ),
        ("status == 1", 0, "false"): (
            "tests/crash/test_kills.py::test_a_standby_replaces_a_stalled_server_which_then_stops"
        ),
        ("line.nonce != server->watch.nonce", 0, "false"): (
            "tests/crash/test_kills.py::test_a_standby_replaces_every_killed_server"
        ),
    },
    ("rpc/standby.c", "bl_watch_silent"): {
        ("count == watch->count", 0, "false"): (
            "tests/crash/test_kills.py::test_a_standby_replaces_a_stalled_server_which_then_stops"
        ),
        ("watch->count != 0", 0, "true"): (
            "tests/rpc/test_machines.py::test_a_standby_replaces_a_server_of_an_earlier_boot_th"
            "at_left_a_torn_heartbeat"
        ),
        ("count > watch->count", 0, "true"): (
            "tests/rpc/test_machines.py::test_a_standby_replaces_a_server_of_an_earlier_boot_th"
            "at_left_a_torn_heartbeat"
        ),
    },
    ("rpc/takeover.c", "bl_takeover_farewell"): {
        ("status >= 0 && line.epoch <= server->epoch", 0, "false"): (
            "tests/rpc/test_session.py::test_a_stopped_server_is_an_error_at_once"
        ),
    },
    ("rpc/takeover.c", "bl_takeover_follow"): {
        ("gone != 0", 0, "false"): (
            "tests/rpc/test_machines.py::test_a_second_server_is_rejected_while_the_first_is_alive"
        ),
    },
    ("rpc/takeover.c", "bl_takeover_plan"): {
        ("!bl_declared(server, line[half].nonce)", 0, "true"): (
            "tests/rpc/test_files.py::test_an_emptied_directory_needs_an_operators_declaration"
        ),
        ("line[newest].epoch == 0", 0, "false"): (
            "tests/index/test_check.py::test_other_hosts_must_be_declared_gone"
        ),
    },
    ("index/task_call.c", "bl_handle_task_claim"): {
        ("status < 0", 0, "false"): "tests/index/test_tasks.py::test_foreign_requests_are_refused",
    },
    ("index/task_call.c", "bl_handle_task_count"): {
        ("status < 0", 0, "false"): "tests/index/test_tasks.py::test_foreign_requests_are_refused",
    },
    ("index/task_call.c", "bl_handle_task_extend"): {
        ("block->generation != request.generation", 0, "false"): (
            "tests/index/test_tasks.py::test_an_old_claim_does_not_apply_to_a_reused_block"
        ),
        (
            "bl_tasks_extend(index->tasks, block->task - 1, call->lane, now_ns, "
            "bl_task_until_ns(now_ns, &request)) < 0",
            0,
            "false",
        ): ("tests/index/test_tasks.py::test_only_the_claiming_session_can_complete_a_task"),
        ("request.block >= index->pool->geometry.block_count_max", 0, "false"): (
            "tests/index/test_tasks.py::test_a_missing_claim_cannot_be_extended"
        ),
        ("status < 0", 0, "false"): "tests/index/test_tasks.py::test_foreign_requests_are_refused",
    },
    ("index/retained.c", "bl_retained_count"): {
        ("step > 0", 0, "true"): (
            "tests/index/test_tasks.py::test_completed_tasks_free_their_space"
        ),
        (
            "step > 0",
            0,
            "false",
        ): "tests/index/test_tasks.py::test_only_the_claiming_session_can_complete_a_task",
    },
    ("index/task_call.c", "bl_task_enqueue"): {
        (
            "status < 0",
            0,
            "true",
        ): "tests/index/test_tasks.py::test_only_the_claiming_session_can_complete_a_task",
    },
    ("index/task_call.c", "bl_task_request_of"): {
        ("call->request_size != sizeof *request", 0, "false"): (
            "tests/index/test_tasks.py::test_foreign_requests_are_refused"
        ),
        ("request->visible_ms > BL_TASK_VISIBLE_MAX_MS", 0, "false"): (
            "tests/index/test_tasks.py::test_foreign_requests_are_refused"
        ),
    },
    ("index/task_client.c", "bl_task_call"): {
        (
            "status < 0",
            0,
            "false",
        ): "tests/index/test_tasks.py::test_only_the_claiming_session_can_complete_a_task",
    },
    ("rpc/quantum.h", "bl_quantum_keys"): {
        ("keys < BL_QUANTUM_KEYS", 0, "false"): (
            "tests/rpc/test_fairness.py::test_a_victim_waits_for_one_quantum_of_each_other"
        ),
        ("keys < BL_QUANTUM_KEYS", 0, "true"): (
            "tests/hostile/test_requests.py::test_a_field_out_of_range_is_an_error_to_its_sender"
        ),
        ("keys > 0", 0, "true"): (
            "tests/rpc/test_fairness.py::test_a_victim_waits_for_one_quantum_of_each_other"
        ),
        ("size > sizeof(bl_block_request)", 0, "true"): (
            "tests/rpc/test_fairness.py::test_a_victim_waits_for_one_quantum_of_each_other"
        ),
    },
    ("rpc/quantum.h", "bl_work_raise"): {
        ("keys > most->keys", 0, "false"): (
            "tests/rpc/test_fairness.py::test_a_victim_waits_for_one_quantum_of_each_other"
        ),
        ("keys > most->keys", 0, "true"): (
            "tests/rpc/test_fairness.py::test_a_victim_waits_for_one_quantum_of_each_other"
        ),
        ("requests > most->requests", 0, "false"): (
            "tests/rpc/test_fairness.py::test_a_victim_waits_for_one_quantum_of_each_other"
        ),
        ("requests > most->requests", 0, "true"): (
            "tests/rpc/test_fairness.py::test_a_victim_waits_for_one_quantum_of_each_other"
        ),
    },
    ("kvcache/put.c", "bl_kv_put_end"): {
        ("written < 0", 0, "false"): (
            "tests/kvcache/test_engine_copy.py::test_grants_of_a_failed_write_are_released"
        ),
    },
    ("kvcache/get.c", "bl_kv_look_guarded"): {
        ("bl_checksums_read(hint->session, &work->entries[i], work) < 0", 0, "true"): (
            "tests/kvcache/test_engine_copy.py::test_an_engine_and_c_read_each_others_blocks"
        ),
    },
    ("kvcache/get.c", "bl_kv_get_end"): {
        ("status == 0 && work->count > 0", 0, "false"): (
            "tests/kvcache/test_engine_copy.py::test_an_engine_and_c_read_each_others_blocks"
        ),
        ("status < 0", 0, "true"): (
            "tests/kvcache/test_engine_copy.py::test_an_engine_and_c_read_each_others_blocks"
        ),
    },
    ("kvcache/get.c", "bl_kv_get_begin"): {
        ("status == 0 && hits > 0", 0, "false"): (
            "tests/kvcache/test_engine_copy.py::test_an_engine_and_c_read_each_others_blocks"
        ),
    },
    ("kvcache/get.c", "bl_kv_read_again"): {
        ("!bl_entry_agrees(session, batch, i, work, &work->entries[i])", 0, "false"): (
            "tests/hostile/test_replies.py::test_a_forged_record_past_the_end_of_the_pool_is_no_hit"
        ),
    },
    ("kvcache/get.c", "bl_kv_get"): {
        ("status < 0", 1, "false"): (
            "tests/kvcache/test_cache.py::test_without_a_server_calls_raise_and_a_get_is_not_a_miss"
        ),
    },
    ("kvcache/get.c", "bl_kv_release"): {
        ("read == 0 && work->count < batch->count", 0, "false"): (
            "tests/kvcache/test_cache.py::test_a_grant_of_another_session_is_pending"
        ),
    },
    ("index/client.c", "bl_index_get_stat"): {
        ("size != sizeof *out", 0, "false"): (
            "tests/hostile/test_replies.py::test_checksums_of_another_length_are_an_error"
        ),
    },
    ("rpc/lobby.c", "bl_lobby_detach"): {
        ("lock < 0", 0, "true"): (
            "tests/rpc/test_session.py::test_closing_releases_the_lane_and_leaves_no_files"
        ),
    },
    ("index/recover.c", "bl_recover_mark"): {
        ("held", 1, "true"): (
            "tests/index/test_takeover.py::test_a_damaged_open_mark_only_affects_its_extent"
        ),
        ("held", 0, "true"): (
            "tests/index/test_takeover.py::test_a_damaged_open_mark_only_affects_its_extent"
        ),
    },
    ("rpc/housekeeping.c", "bl_lane_of_old"): {
        ("!bl_lane_here(server, lane)", 0, "true"): (
            "tests/rpc/test_machines.py::"
            "test_a_session_of_this_boot_without_a_lock_file_is_not_one_of_an_earlier_boot"
        ),
        ("lane->epoch == server->epoch", 0, "false"): (
            "tests/rpc/test_machines.py::test_a_session_of_this_server_never_counts_as_one_of"
            "_an_earlier_boot"
        ),
    },
    ("rpc/lobby.c", "bl_lobby_clash"): {
        ("reply.epoch == epoch->epoch", 0, "true"): (
            "tests/rpc/test_machines.py::test_a_host_record_of_an_older_server_excludes_no_machine"
        ),
    },
    ("index/journal.c", "bl_names_look"): {
        ("line.generation != entry.generation", 0, "false"): (
            "tests/index/test_names.py::test_a_name_of_another_generation_is_not_read"
        ),
    },
    ("index/reclaim.c", "bl_space_take"): {
        ("!bl_space_evict(index, size, offset)", 0, "true"): (
            "tests/index/test_block_calls.py::test_the_coldest_block_makes_room"
        ),
    },
    ("index/recover.c", "bl_recover_tombstone"): {
        ("entry->state == BL_ENTRY_TIER", 0, "false"): (
            "tests/tiers/test_removals.py::test_a_removal_waits_for_its_tier_also_if_a_server_r"
            "uns_without_it"
        ),
    },
    ("index/recover.c", "bl_recover_tiers"): {
        ("number < 0", 0, "true"): (
            "tests/tiers/test_removals.py::test_a_removal_reaches_a_tier_that_the_server_lacks"
        ),
    },
    ("index/table.c", "bl_tombstone_write"): {
        ("block->state == BL_NUMBER_TIER", 0, "false"): (
            "tests/tiers/test_removals.py::test_a_removal_waits_for_its_tier_also_if_a_server_r"
            "uns_without_it"
        ),
    },
    ("index/tombstones.c", "bl_tombstone_tier"): {
        ("tombstones->id[tier] == 0", 0, "false"): (
            "tests/tiers/test_removals.py::test_a_removal_waits_for_its_tier_also_if_a_server_r"
            "uns_without_it"
        ),
    },
    ("index/tombstones.c", "bl_tombstones_unmarked"): {
        (
            "index->tombstones->id[tier] != 0 && index->tombstones->line[tier] == BL_NO_NUMBER",
            0,
            "false",
        ): ("tests/tiers/test_removals.py::test_a_removal_reaches_a_tier_that_the_server_lacks"),
    },
    ("rpc/takeover.c", "bl_takeover_enter"): {
        ("status < 0", 0, "true"): (
            "tests/rpc/test_idle.py::test_an_idle_server_uses_little_of_a_core"
        ),
    },
}
