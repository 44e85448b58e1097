# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Conditions that the simulator need not miss when they are dropped, each with its reason.

A condition is named by file, function, its text and its place among equal ones of the function.
Most of these decide how long something takes, and a simulated host has time; or they say again what
another check says, too. A test of Python that fails without a condition is named where it is the
reason.
"""

from __future__ import annotations

Condition = tuple[str, str, str, int]

_ANN = "decides what the simulator's oracle is told, which can only make it miss something here"
_ASK = "a server that does not serve is asked, and does not answer, which costs time"
_CELL = "only which blocks make room differs, which costs misses or a refusal"
_LIFE = "the simulator's servers have no pidfds; one is NULL only where the kernel has none"
_NAP = "only how long an idle server naps, or how often it looks at its clock, differs"
_PERIOD = "the house is kept more often than it must be, which costs time"
_PIECE = (
    "the check, which stands in one 8-byte piece with the second sequence, covers all before it"
)
_QUANTUM = (
    "only how much of a lane's turn a request counts for differs: fairness, not what is answered"
)
_R1 = "nobody reads the bytes of a reply whose status is an error"
_R10 = "evicts a block though there was a number left, which costs a miss"
_R11 = "invalidates the same lines more often, or lines behind the table, which costs time"
_R12 = "sorts what is in order already, or by a digit in which all agree: stable, so nothing moves"
_R13 = "the line is read more often than is needed, and its last value is taken"
_R14 = "a full fence more, which costs time"
_R15 = "a call whose time is up is asked once more with no time left, and times out"
_R16 = "a server that does not serve is found silent a little later, and then tried all the same"
_R17 = "an empty line is mended, or nobody's sessions are inherited: there are none"
_R18 = "counts for statistics, which no decision rests on (tests/rpc/test_fairness.py counts them)"
_R2 = "clients go by the status of a commit's record, which says the same as its state"
_R3 = "looks at the epoch though no task was committed, which costs time"
_R4 = "boot ids are random in both words: either comparison would do"
_R5 = "an inherited session is in doubt already, so it can only end as GONE"
_R6 = "checks bytes though the caller does without, which costs time"
_R7 = "only who pays for the bytes on the link differs, and the simulator has no link"
_R8 = "copies no bytes"
_R9 = "only which error says that time is up differs"
_STAT = "counts for statistics, which no decision rests on"
_THREADS = "only which thread copies, and who pays on the link, differs; the simulator has neither"
_TRY = "only when to try a takeover differs: whether it may is decided in takeover.c"
_WINDOW = "only how many lines are looked at together differs: one that has not come ends the look"

# Always true.
TRUE: dict[Condition, str] = {
    (
        "device_care.c",
        "bl_care_take",
        "care == BL_CARE_INVALIDATE",
        0,
    ): "what a device reads from needs the most care: the other two do less of the same",
    (
        "device_care.c",
        "bl_care_take",
        "care == BL_CARE_FLUSH",
        0,
    ): "a flush of the range begins with the fence that the other one is",
    (
        "device_care.c",
        "bl_care_run",
        "job->care != BL_CARE_FENCE",
        0,
    ): "a fence that is asked for comes once for each range, which costs time",
    (
        "device_care.c",
        "bl_care_run",
        "i > 0",
        0,
    ): "no plan has a range at offset 0, where the server's lines are",
    (
        "device_care.c",
        "bl_care_run",
        "i > 0",
        1,
    ): "takes care of the empty range before the first one, which costs time",
    (
        "elect.c",
        "bl_candidates_read",
        "status < 0",
        0,
    ): "reads a candidate's line once more, from memory, which costs time",
    ("epoch.h", "bl_epoch_read", "status == 1", 0): (
        "a line that nobody wrote has the epoch 0, and a damaged one is an error whatever it says"
    ),
    (
        "epoch.h",
        "bl_epoch_serving",
        "line->epoch != 0",
        0,
    ): "a line that nobody wrote has no state either",
    ("epoch.h", "bl_epoch_serving", "line->state == BL_SERVER_SERVING", 0): (
        "a server that takes over or has stopped is asked in vain until time is up or a "
        "successor serves"
    ),
    (
        "grant.c",
        "bl_handle_reserve",
        "head.flags & BL_RESERVE_KEPT",
        0,
    ): "looks for tasks whose time is up once more than is needed",
    ("grant.c", "bl_handle_reserve", "status == 0", 0): _R1,
    ("grant.c", "bl_handle_commit", "status == 0", 1): _R1,
    ("grant.c", "bl_handle_commit", "status < 0", 0): _R2,
    ("grant.c", "bl_handle_commit", "meta->blocks[commit.block].task != 0", 0): _R3,
    ("grant.c", "bl_handle_commit", "kept", 0): _R3,
    ("house.c", "bl_lane_here", "lane->boot_id[0] == server->boot_id[0]", 0): _R4,
    ("house.c", "bl_lobby_give", "request->boot_id[0] == server->boot_id[0]", 0): _R4,
    ("standby.c", "bl_watch_begin", "line->boot_id[0] == server->boot_id[0]", 0): _R4,
    ("takeover.c", "bl_session_over", "line->boot_id[0] == server->boot_id[0]", 0): _R4,
    (
        "house.c",
        "bl_lane_over",
        "lane->state == BL_SESSION_LIVE",
        0,
    ): "a lane that is not LIVE is not in the list that it would be removed from",
    (
        "house.c",
        "bl_lane_over",
        "!inherited",
        0,
    ): "this server gave an inherited session nothing, so its end has nothing to do",
    ("house.c", "bl_lane_over", "end == BL_END_GONE", 1): _R5,
    ("house.c", "bl_lane_over", "end == BL_END_GONE", 2): _R5,
    ("house.c", "bl_house_end", "end == BL_END_GONE", 0): (
        "a session ends in doubt only where this host has no proof of it: there is none to remove"
    ),
    ("house.c", "bl_house_end", "server->life", 0): _LIFE,
    ("house.c", "bl_lobby_serve", "server->life", 0): _LIFE,
    ("house.c", "bl_lobby_serve", "lane < 0", 0): _LIFE,
    ("house.c", "bl_house_mourn", "server->life", 0): _LIFE,
    ("takeover.c", "bl_server_destroy", "server->life", 0): _LIFE,
    (
        "house.c",
        "bl_lobby_give",
        "request->old_nonce",
        0,
    ): "no session has the nonce 0, so no lane is found",
    ("house.c", "bl_lobby_give", "known >= 0", 0): (
        "reads outside of a table, which only a sanitizer sees: lanes[-1], whose state is none"
    ),
    (
        "house.c",
        "bl_lobby_give",
        "here",
        1,
    ): "another host's session has no proof here, so there is none to watch",
    ("house.c", "bl_lobby_look", "request.sequence == request.sequence_end", 0): _PIECE,
    ("lobby.c", "bl_lobby_reply_read", "out->sequence == out->sequence_end", 0): _PIECE,
    ("message.h", "bl_request_whole", "request->sequence == request->sequence_end", 0): _PIECE,
    ("message.h", "bl_reply_whole", "reply->sequence == reply->sequence_end", 0): _PIECE,
    ("house.c", "bl_house_keep", "now_ns - server->sweep_ns > BL_SWEEP_PERIOD_NS", 0): _PERIOD,
    (
        "kv.c",
        "bl_kv_commit",
        "work->count > 0",
        0,
    ): "asks the server to commit nothing, which costs a call",
    (
        "kv.c",
        "bl_kv_retire",
        "status == -BL_ERROR_DEVICE_FAULT",
        0,
    ): "where no device failed there is no offset either",
    (
        "kv.c",
        "bl_kv_publish",
        "status < 0",
        0,
    ): "an abort of what was committed, or of an ended session, is refused",
    (
        "kv.c",
        "bl_kv_publish",
        "work->count > 0",
        0,
    ): "asks the server to abort nothing, which costs a call",
    (
        "kv_engine.c",
        "bl_kv_vectors_guarded",
        "work->chunk_count > 0",
        0,
    ): "copies no bytes where there are no checksums",
    ("kv_get.c", "bl_entry_agrees", "agrees", 0): _ANN,
    ("kv_get.c", "bl_kv_confirm", "batch->verify", 0): _ANN,
    ("recover.c", "bl_recover_mark", "whole", 0): _ANN,
    ("recover.c", "bl_recover_entries", "whole", 0): _ANN,
    (
        "kv_get.c",
        "bl_kv_read_guarded",
        "work->chunk_count > 0",
        0,
    ): "checks blocks that have no checksums: the vector is empty, and so is its check",
    ("kv_get.c", "bl_kv_read_guarded", "batch->verify", 0): _R6,
    ("kv_get.c", "bl_kv_read_guarded", "verify", 0): _R6,
    ("kv_get.c", "bl_kv_read", "toll != NULL", 0): _R7,
    ("kv_get.c", "bl_kv_hit_read", "hand > 0", 0): _THREADS,
    ("kv_get.c", "bl_kv_hit_read", "read->threads > 1", 0): _THREADS,
    ("kv_get.c", "bl_kv_hit_read", "last", 0): _THREADS,
    ("kv_get.c", "bl_kv_block_threads", "batch->length >= 2 * part", 0): _THREADS,
    (
        "kv_get.c",
        "bl_kv_release",
        "work->count > 0",
        0,
    ): "asks the server to release nothing, which costs a call",
    (
        "kv_get.c",
        "bl_kv_release",
        "work->count < batch->count",
        0,
    ): "writes the state of a key behind the last one, which only a sanitizer sees",
    (
        "kv_get.c",
        "bl_kv_release",
        "read == 0",
        0,
    ): "what a get that failed leaves in states is not read",
    (
        "kv_get.c",
        "bl_kv_get",
        "work.count > 0",
        0,
    ): "reads no block, and looks at the epoch once, which costs time",
    ("kv_engine.c", "bl_kv_get_begin", "hits > 0", 0): "looks at no entry, which costs two fences",
    (
        "kv_engine.c",
        "bl_kv_get_end",
        "work->count > 0",
        0,
    ): "looks at no entry, and at the epoch once, which costs time",
    ("lane.c", "bl_lane_take", "session->window < waiting", 0): _WINDOW,
    ("lane.c", "bl_lane_take", "taken == window", 0): _WINDOW,
    (
        "lane.c",
        "bl_lane_take",
        "window < count",
        0,
    ): "who takes one reply has asked for one, so no more can come",
    (
        "lane.c",
        "bl_lane_wait",
        "wait->waited_ns - looked > BL_EPOCH_LOOK_NS",
        0,
    ): "looks at the epoch at every turn, which costs time",
    ("lane.c", "bl_bulk_send", "whole > 0", 0): "streams no bytes",
    ("lane.c", "bl_bulk_send", "size > whole", 0): (
        "a line of zeros more behind the request, in an area that no request of the simulator fills"
    ),
    (
        "lane.c",
        "bl_lane_call",
        "taken == 0",
        0,
    ): "time is up then, which the caller sees before it asks again",
    (
        "lobby.c",
        "bl_lobby_clash",
        "bl_lobby_reply_read(session, epoch->epoch % BL_HALF_COUNT, &reply)",
        0,
    ): ("who sees a torn reply as a clash looks again until time is up, and then it is whole"),
    ("lobby.c", "bl_lobby_exchange", "bl_epoch_serving(&epoch)", 0): _ASK,
    ("lobby.c", "bl_lobby_exchange", "serving", 1): _ASK,
    (
        "lobby.c",
        "bl_lobby_exchange",
        "serving",
        0,
    ): "only which error says that no server of this host serves differs",
    ("lobby.c", "bl_lobby_exchange", "serving", 2): (
        "an answer is the one that was asked for, whoever serves since: the epoch in it is checked"
    ),
    ("lobby.c", "bl_lobby_exchange", "serving", 3): _R9,
    ("lobby.c", "bl_lobby_exchange", "epoch.epoch != asked", 0): (
        "asks again at every look, under a new sequence, until the answer to the last one comes"
    ),
    ("lobby.c", "bl_lobby_attach", "open == 0", 0): (
        "a lane that was given after the client gave up is in doubt for ever without its "
        "proof, which costs the lane"
    ),
    ("lobby.c", "bl_lobby_attach", "status < 0", 0): (
        "with an answer nothing is open, and a proof that an attached session holds is "
        "not ended here"
    ),
    ("lookup.c", "bl_pin", "meta->blocks[number].pin_count++ == 0", 0): (
        "counts for statistics, which no decision rests on; a block that is not in the "
        "order can be removed from it again"
    ),
    (
        "lookup.c",
        "bl_lookup_chain",
        "hits + BL_PREFETCH_KEYS < count",
        0,
    ): "asks for memory by a key behind the last one, which is a hint",
    ("reclaim.c", "bl_number_take", "meta->free_number == BL_NO_NUMBER", 0): _R10,
    (
        "reclaim.c",
        "bl_number_take",
        "meta->fresh_number == meta->pool->geometry.block_count_max",
        0,
    ): _R10,
    ("reclaim.c", "bl_cell_next", "from + BL_EXTENT_STRIPES_MAX <= first", 0): _CELL,
    ("reclaim.c", "bl_cell_next", "view->first_stripe < first + count", 0): _CELL,
    (
        "recover.c",
        "bl_recover_mark",
        "whole",
        1,
    ): "a damaged mark is no better than none: bl_extents_adopt() judges its fields",
    ("recover.c", "bl_recover_entries", "whole", 1): (
        "a damaged entry is copied with the check that convicts it: every reader refuses it again"
    ),
    (
        "recover.c",
        "bl_recover_entries",
        "entry.state == BL_ENTRY_COMMITTED",
        0,
    ): "a free entry has no bytes, so bl_entry_invalid() refuses it",
    ("recover.c", "bl_recover_entries", "bl_line_used((uint64_t *)&entry)", 0): _STAT,
    ("recover_sort.h", "bl_recovered_sort", "!in_order", 0): _R12,
    (
        "register.h",
        "bl_register_load",
        "bl_line_used(first)",
        0,
    ): "a line of zeros is looked at a second time, which costs time",
    ("register.h", "bl_register_read", "first_ever < 2", 0): _R13,
    ("register.h", "bl_register_read", "status < 0", 0): _R13,
    (
        "register.h",
        "bl_register_read",
        "tries > 0",
        0,
    ): "a pause before the first look, which costs time",
    (
        "server.c",
        "bl_server_handle",
        "status == 0",
        0,
    ): "only which error a bad request gets differs",
    ("server.c", "bl_server_handle", "status < 0", 0): _STAT,
    (
        "server.c",
        "bl_lane_answer",
        "server->quota.calls_per_s",
        0,
    ): "an allowance of nothing is filled with nothing",
    ("server.c", "bl_server_round", "server->live_count > 1", 0): _R14,
    ("server.c", "bl_server_round", "server->round[0].requests != before", 0): _R14,
    ("server.c", "bl_idle_nap_ns", "nap_ns < BL_IDLE_NAP_NS", 0): _NAP,
    ("server.c", "bl_server_loop", "idle_ns >= BL_IDLE_SPIN_NS", 0): _NAP,
    ("server.c", "bl_server_loop", "busy == 0", 0): _NAP,
    ("server.c", "bl_server_loop", "busy > 0", 0): _NAP,
    (
        "session.c",
        "bl_session_ask",
        "status != -BL_ERROR_TIMEOUT",
        0,
    ): "a call that timed out is not asked again: the next condition says so",
    (
        "session.c",
        "bl_session_pump_all",
        "batch > 0",
        0,
    ): "fences for a batch of none, which costs time",
    (
        "standby.c",
        "bl_watch_look_guarded",
        "line.nonce != server->watch.nonce",
        0,
    ): "the same server is watched anew at every look: it seems to have moved just now",
    ("standby.c", "bl_server_watch", "status != 0", 0): _TRY,
    ("takeover.c", "bl_takeover_pass", "plan->before.epoch != 0", 0): _R17,
    ("takeover.c", "bl_takeover_pass", "plan->source.epoch != 0", 0): _R17,
    ("task_client.c", "bl_task_ask", "size > 0", 0): _R8,
    ("turn.h", "bl_turn_keys", "request->flags & BL_MESSAGE_BULK", 0): _QUANTUM,
    ("turn.h", "bl_turn_keys", "size > sizeof(bl_block_request)", 0): _QUANTUM,
    ("turn.h", "bl_turn_keys", "keys > 0", 0): _QUANTUM,
    ("turn.h", "bl_work_raise", "requests > most->requests", 0): _R18,
    ("turn.h", "bl_work_raise", "keys > most->keys", 0): _R18,
}

# Always false.
FALSE: dict[Condition, str] = {
    ("elect.c", "bl_ballot", "phase == 2", 0): (
        "in the second phase the greatest accepted ballot is the own one, so it is "
        "adopted unchanged"
    ),
    (
        "grant.c",
        "bl_reuse_check",
        "!meta->reused",
        0,
    ): "looks at the epoch though no space was reused, which costs time",
    ("grant.c", "bl_handle_commit", "status < 0", 0): _R2,
    ("takeover.c", "bl_server_gone", "boot_id[0] != server->boot_id[0]", 0): _R4,
    ("house.c", "bl_lobby_give", "here", 1): (
        "without its proof a session of this host ends when its beat stands still: later, "
        "and in doubt"
    ),
    (
        "house.c",
        "bl_lobby_give",
        "status < 0",
        0,
    ): "the look after the new session line was written says so, too",
    ("house.c", "bl_lobby_serve", "lane == -BL_ERROR_DEPOSED", 0): (
        "the client is told that its server is deposed, and asks again as if it had found that out"
    ),
    (
        "house.c",
        "bl_lobby_serve",
        "lane < 0",
        2,
    ): "the lane in a reply that is an error is not read",
    (
        "house.c",
        "bl_house_watch",
        "lane->state == BL_SESSION_FREE",
        0,
    ): "a free lane has no proof and is not LIVE, so it is passed over all the same",
    ("house.c", "bl_house_watch", "lane->proof >= 0", 0): (
        "a session that nobody proves gone falls silent, too: later, and its lane stays in doubt"
    ),
    (
        "house.c",
        "bl_house_watch",
        "lane->state != BL_SESSION_LIVE",
        0,
    ): "a session in doubt that is found silent once more stays as it is",
    ("house.c", "bl_house_sweep", "count <= 0", 0): (
        "looks into the lobby and at the epoch though no proof is left to remove, which costs time"
    ),
    ("house.c", "bl_house_keep", "now_ns - server->house_ns < BL_HOUSE_PERIOD_NS", 0): _PERIOD,
    ("house.c", "bl_house_keep", "now_ns - server->proof_ns < BL_PROOF_PERIOD_NS", 0): _PERIOD,
    ("house.c", "bl_house_keep", "status < 0", 0): "the look that follows says so, too",
    ("kv_engine.c", "bl_kv_look_guarded", "!batch->verify", 0): (
        "reads checksums that the engine then does not ask for; a damaged vector makes a "
        "miss, never wrong bytes"
    ),
    ("kv_get.c", "bl_kv_confirm", "batch->verify", 0): _ANN,
    ("kv_get.c", "bl_kv_read", "toll != NULL", 0): _R7,
    ("kv_get.c", "bl_kv_block_threads", "size < part", 0): _THREADS,
    ("kv_get.c", "bl_kv_hits_guarded", "threads < BL_CREW_HANDS", 0): _THREADS,
    ("lane.c", "bl_lane_send", "size == 0", 0): _R8,
    ("lane.c", "bl_lane_take", "session->window < waiting", 0): _WINDOW,
    ("lane.c", "bl_lane_take", "window < count", 0): _WINDOW,
    ("lane.c", "bl_lane_take", "taken == window", 0): _WINDOW,
    ("lane.c", "bl_lane_take", "window * 2 < BL_WINDOW_MAX", 0): _WINDOW,
    (
        "lane.c",
        "bl_session_stale",
        "!bl_epoch_serving(&epoch)",
        0,
    ): "waits for a server that has stopped until time is up or another epoch is out",
    (
        "lane.c",
        "bl_lane_call",
        "message->request_size <= BL_MESSAGE_INLINE_SIZE",
        0,
    ): "a short request goes through the bulk area like a long one, which costs time",
    ("lobby.c", "bl_lobby_exchange", "serving", 3): _R9,
    (
        "lobby.c",
        "bl_lobby_exchange",
        "epoch.epoch == 0",
        0,
    ): "a pool that nobody ever served is looked at until time is up",
    ("reclaim.c", "bl_cell_next", "view->first_stripe + view->stripe_count > first", 0): _CELL,
    ("reclaim.c", "bl_cell_empty", "!bl_extent_may_go(meta, &view)", 0): _CELL,
    ("reclaim.c", "bl_cell_empty", "view.block_size == block_size", 0): _CELL,
    ("reclaim.c", "bl_space_evict", "own", 0): _CELL,
    ("reclaim.c", "bl_space_evict", "bl_space_open(meta, block_size, BL_FIT_ANY) == 0", 0): _CELL,
    ("reclaim.c", "bl_space_evict", "own", 1): _CELL,
    ("reclaim.c", "bl_space_evict", "stripes", 0): _CELL,
    ("reclaim.c", "bl_space_take", "status == -BL_ERROR_DEPOSED", 0): (
        "the check before the reply (bl_reuse_check) says so, too, and again at every later one"
    ),
    ("recover.c", "bl_scan_refetch", "line % BL_SCAN_LINES != 0", 0): _R11,
    ("recover.c", "bl_scan_refetch", "line_count - line < BL_SCAN_LINES", 0): _R11,
    (
        "recover.c",
        "bl_recover_extents",
        "stripe < taken",
        0,
    ): "bl_extents_adopt() refuses a mark whose stripes are taken",
    ("recover.c", "bl_recover_entries", "!whole", 0): _STAT,
    (
        "recover.c",
        "bl_recover",
        "old_epoch == 0",
        0,
    ): "the half of a pool that nobody served is empty: nothing is recovered from it",
    ("recover_sort.h", "bl_recovered_sort", "(differ >> shift & (BL_RADIX - 1)) == 0", 0): _R12,
    ("server.c", "bl_lane_gather", "ready == lane->window", 0): _WINDOW,
    ("server.c", "bl_lane_gather", "window < BL_QUANTUM_REQUESTS", 0): _WINDOW,
    (
        "server.c",
        "bl_server_round",
        "turn.requests == 0",
        0,
    ): "a lane without requests takes an empty turn, which costs time",
    ("server.c", "bl_idle_nap_ns", "idle_ns < BL_IDLE_YIELD_NS", 0): _NAP,
    ("server.c", "bl_idle_nap_ns", "nap_ns < BL_IDLE_NAP_NS", 0): _NAP,
    ("server.c", "bl_server_loop", "++rounds % BL_ROUNDS_PER_CLOCK", 0): _NAP,
    ("session.c", "bl_session_ask", "bl_wait_left_ns(memory, &wait) == 0", 0): _R15,
    ("session.c", "bl_session_ask", "status == -BL_ERROR_TIMEOUT", 0): _R15,
    ("standby.c", "bl_watch_silent", "count == watch->count", 0): (
        "tells a beat's age from the last look, so it seems younger: a takeover comes later"
    ),
    ("standby.c", "bl_watch_look_guarded", "line.state == BL_SERVER_STOPPED", 0): _R16,
    ("standby.c", "bl_watch_look_guarded", "line.epoch == 0", 0): _R16,
    (
        "standby.c",
        "bl_watch_look_guarded",
        "bl_watch_silent(server, &line, lost_ns, now_ns)",
        0,
    ): _TRY,
    (
        "takeover.c",
        "bl_epoch_gone",
        "line->epoch == 0",
        0,
    ): "a server of epoch 0 is nobody, and nobody's proof is looked for in vain",
    (
        "task_call.c",
        "bl_tasks_max",
        "most < BL_TASKS_MAX",
        0,
    ): "no pool of the simulator has so many blocks that the limit is reached",
    ("turn.h", "bl_turn_keys", "size > sizeof(bl_block_request)", 0): _QUANTUM,
    ("turn.h", "bl_turn_keys", "keys > 0", 0): _QUANTUM,
    ("turn.h", "bl_turn_keys", "keys < BL_QUANTUM_KEYS", 0): _QUANTUM,
    ("turn.h", "bl_work_raise", "requests > most->requests", 0): _R18,
    ("turn.h", "bl_work_raise", "keys > most->keys", 0): _R18,
}
