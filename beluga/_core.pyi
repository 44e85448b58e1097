# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Generated from the C headers by scripts/dev/gen_stubs.py; do not edit.

A class here stands for a structure, a pointer to one and an array of them; `bl_x_init` is what
`ffi.new` fills a `bl_x` with. Only `ffi` and `lib` exist at run time.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypedDict, TypeVar, overload

from beluga._cdata import BufferLike as BufferLike
from beluga._cdata import CBuffer as CBuffer
from beluga._cdata import CData as CData
from beluga._cdata import CItems as CItems
from beluga._cdata import CNumber as CNumber
from beluga._cdata import CNumbers as CNumbers
from beluga._cdata import CPointer as CPointer
from beluga._cdata import CStruct as CStruct
from beluga._cdata import Null as Null
from beluga._cdata import char_p as char_p
from beluga._cdata import double_p as double_p
from beluga._cdata import int32_p as int32_p
from beluga._cdata import int64_p as int64_p
from beluga._cdata import uint16_p as uint16_p
from beluga._cdata import uint32_p as uint32_p
from beluga._cdata import uint64_p as uint64_p
from beluga._cdata import uint8_p as uint8_p
from beluga._cdata import void_p as void_p

bl_handler = Callable[[void_p, bl_call], int]

class bl_geometry(CStruct):
    device_count: int
    interleaved: int
    device_size: int
    size: int
    lane_count: int
    slot_count: int
    bulk_size: int
    block_count_max: int
    session_offset: int
    lane_offset: int
    lane_stride: int
    table_offset: int
    extent_offset: int
    data_offset: int
    stripe_count: int
    name_offset: int
    reserved: uint64_p

class bl_geometry_init(TypedDict, total=False):
    device_count: int
    interleaved: int
    device_size: int
    size: int
    lane_count: int
    slot_count: int
    bulk_size: int
    block_count_max: int
    session_offset: int
    lane_offset: int
    lane_stride: int
    table_offset: int
    extent_offset: int
    data_offset: int
    stripe_count: int
    name_offset: int
    reserved: uint64_p | Sequence[int]

class bl_superblock(CStruct):
    magic: uint8_p
    version: int
    header_size: int
    format_hash: int
    pool_id: uint8_p
    device_index: int
    coherence: int
    sparse: int
    stripe_size: int
    created_s: int
    geometry: bl_geometry
    reserved: uint64_p
    reserved_tail: int
    check: int

class bl_superblock_init(TypedDict, total=False):
    magic: uint8_p | bytes | Sequence[int]
    version: int
    header_size: int
    format_hash: int
    pool_id: uint8_p | bytes | Sequence[int]
    device_index: int
    coherence: int
    sparse: int
    stripe_size: int
    created_s: int
    geometry: bl_geometry | bl_geometry_init
    reserved: uint64_p | Sequence[int]
    reserved_tail: int
    check: int

class bl_epoch_line(CStruct):
    epoch: int
    boot_id: uint64_p
    nonce: int
    host: int
    state: int
    pid: int
    reserved: uint32_p
    reserved_tail: int
    check: int

class bl_epoch_line_init(TypedDict, total=False):
    epoch: int
    boot_id: uint64_p | Sequence[int]
    nonce: int
    host: int
    state: int
    pid: int
    reserved: uint32_p | Sequence[int]
    reserved_tail: int
    check: int

class bl_candidate_line(CStruct):
    epoch: int
    ballot: int
    accepted: int
    nonce: int
    boot_id: uint64_p
    host: int
    reserved: int
    reserved_tail: int
    check: int

class bl_candidate_line_init(TypedDict, total=False):
    epoch: int
    ballot: int
    accepted: int
    nonce: int
    boot_id: uint64_p | Sequence[int]
    host: int
    reserved: int
    reserved_tail: int
    check: int

class bl_heartbeat_line(CStruct):
    count: int
    nonce: int
    reserved: uint64_p
    reserved_tail: int
    check: int

class bl_heartbeat_line_init(TypedDict, total=False):
    count: int
    nonce: int
    reserved: uint64_p | Sequence[int]
    reserved_tail: int
    check: int

class bl_lobby_request(CStruct):
    sequence: int
    operation: int
    nonce: int
    old_nonce: int
    boot_id: uint64_p
    host: int
    pid: int
    epoch: int
    check: int
    sequence_end: int

class bl_lobby_request_init(TypedDict, total=False):
    sequence: int
    operation: int
    nonce: int
    old_nonce: int
    boot_id: uint64_p | Sequence[int]
    host: int
    pid: int
    epoch: int
    check: int
    sequence_end: int

class bl_lobby_reply(CStruct):
    sequence: int
    status: int
    nonce: int
    epoch: int
    boot_id: uint64_p
    lane: int
    live_count: int
    reserved: uint32_p
    check: int
    sequence_end: int

class bl_lobby_reply_init(TypedDict, total=False):
    sequence: int
    status: int
    nonce: int
    epoch: int
    boot_id: uint64_p | Sequence[int]
    lane: int
    live_count: int
    reserved: uint32_p | Sequence[int]
    check: int
    sequence_end: int

class bl_doorbell(CStruct):
    ring: uint64_p

class bl_doorbell_init(TypedDict, total=False):
    ring: uint64_p | Sequence[int]

class bl_session_line(CStruct):
    nonce: int
    boot_id: uint64_p
    host: int
    state: int
    epoch: int
    reserved: uint32_p
    check: int

class bl_session_line_init(TypedDict, total=False):
    nonce: int
    boot_id: uint64_p | Sequence[int]
    host: int
    state: int
    epoch: int
    reserved: uint32_p | Sequence[int]
    check: int

class bl_request(CStruct):
    sequence: int
    method: int
    flags: int
    size: int
    epoch: int
    reserved: int
    payload: uint8_p
    check: int
    sequence_end: int

class bl_request_init(TypedDict, total=False):
    sequence: int
    method: int
    flags: int
    size: int
    epoch: int
    reserved: int
    payload: uint8_p | bytes | Sequence[int]
    check: int
    sequence_end: int

class bl_reply(CStruct):
    sequence: int
    reserved: int
    flags: int
    size: int
    epoch: int
    status: int
    payload: uint8_p
    check: int
    sequence_end: int

class bl_reply_init(TypedDict, total=False):
    sequence: int
    reserved: int
    flags: int
    size: int
    epoch: int
    status: int
    payload: uint8_p | bytes | Sequence[int]
    check: int
    sequence_end: int

class bl_bulk(CStruct):
    size: int
    check: int

class bl_bulk_init(TypedDict, total=False):
    size: int
    check: int

class bl_block_request(CStruct):
    fingerprint: int
    length: int
    chunk_size: int
    count: int
    flags: int

class bl_block_request_init(TypedDict, total=False):
    fingerprint: int
    length: int
    chunk_size: int
    count: int
    flags: int

class bl_task_request(CStruct):
    queue: int
    generation: int
    block: int
    visible_ms: int

class bl_task_request_init(TypedDict, total=False):
    queue: int
    generation: int
    block: int
    visible_ms: int

class bl_task(CStruct):
    key: uint64_p
    generation: int
    block: int
    length: int
    deliveries: int
    reserved: int

class bl_task_init(TypedDict, total=False):
    key: uint64_p | Sequence[int]
    generation: int
    block: int
    length: int
    deliveries: int
    reserved: int

class bl_task_counts(CStruct):
    waiting: int
    claimed: int

class bl_task_counts_init(TypedDict, total=False):
    waiting: int
    claimed: int

class bl_lower_request(CStruct):
    token: int
    count: int
    kind: int
    tier: int
    reserved: int

class bl_lower_request_init(TypedDict, total=False):
    token: int
    count: int
    kind: int
    tier: int
    reserved: int

class bl_lower_record(CStruct):
    key: uint64_p
    fingerprint: int
    generation: int
    offset: int
    length: int
    chunk_size: int
    block: int
    tiers: int
    stale: int
    reserved: int

class bl_lower_record_init(TypedDict, total=False):
    key: uint64_p | Sequence[int]
    fingerprint: int
    generation: int
    offset: int
    length: int
    chunk_size: int
    block: int
    tiers: int
    stale: int
    reserved: int

class bl_lower_note(CStruct):
    key: uint64_p
    generation: int
    block: int
    stored: int
    lost: int
    ended: int
    removal: int

class bl_lower_note_init(TypedDict, total=False):
    key: uint64_p | Sequence[int]
    generation: int
    block: int
    stored: int
    lost: int
    ended: int
    removal: int

class bl_retire_request(CStruct):
    offset: int

class bl_retire_request_init(TypedDict, total=False):
    offset: int

class bl_block_reply(CStruct):
    count: int
    state: int

class bl_block_reply_init(TypedDict, total=False):
    count: int
    state: int

class bl_block_record(CStruct):
    offset: int
    generation: int
    block: int
    length: int
    state: int
    status: int

class bl_block_record_init(TypedDict, total=False):
    offset: int
    generation: int
    block: int
    length: int
    state: int
    status: int

class bl_commit(CStruct):
    key: uint64_p
    generation: int
    block: int
    checksums_crc: int

class bl_commit_init(TypedDict, total=False):
    key: uint64_p | Sequence[int]
    generation: int
    block: int
    checksums_crc: int

class bl_name(CStruct):
    block_hash: int
    parent_hash: int
    tokens_hash: int
    space: int
    block_tokens: int
    rank: int
    rank_count: int
    flags: int
    reserved: int

class bl_name_init(TypedDict, total=False):
    block_hash: int
    parent_hash: int
    tokens_hash: int
    space: int
    block_tokens: int
    rank: int
    rank_count: int
    flags: int
    reserved: int

class bl_named_commit(CStruct):
    commit: bl_commit
    name: bl_name

class bl_named_commit_init(TypedDict, total=False):
    commit: bl_commit | bl_commit_init
    name: bl_name | bl_name_init

class bl_entry(CStruct):
    key: uint64_p
    generation: int
    offset: int
    fingerprint: int
    length: int
    chunk_size: int
    checksums_crc: int
    state: int
    flags: int
    check: int

class bl_entry_init(TypedDict, total=False):
    key: uint64_p | Sequence[int]
    generation: int
    offset: int
    fingerprint: int
    length: int
    chunk_size: int
    checksums_crc: int
    state: int
    flags: int
    check: int

class bl_name_line(CStruct):
    generation: int
    name: bl_name
    reserved: int
    check: int

class bl_name_line_init(TypedDict, total=False):
    generation: int
    name: bl_name | bl_name_init
    reserved: int
    check: int

class bl_extent_line(CStruct):
    epoch: int
    generation: int
    first_stripe: int
    stripe_count: int
    block_size: int
    block_count: int
    state: int
    reserved: uint32_p
    check: int

class bl_extent_line_init(TypedDict, total=False):
    epoch: int
    generation: int
    first_stripe: int
    stripe_count: int
    block_size: int
    block_count: int
    state: int
    reserved: uint32_p | Sequence[int]
    check: int

class bl_takeover_cause(CStruct):
    epoch: int
    silent_ns: int
    host: int
    reason: int

class bl_takeover_cause_init(TypedDict, total=False):
    epoch: int
    silent_ns: int
    host: int
    reason: int

class bl_server_stat(CStruct):
    epoch: int
    call_count: int
    error_count: int
    key_count: int
    torn_count: int
    quota_call_count: int
    quota_grant_count: int
    quota_pin_count: int
    quantum_request_max: int
    quantum_key_max: int
    wait_request_max: int
    wait_key_max: int
    attach_count: int
    end_count: int
    live_count: int
    inherited_count: int
    watched_count: int
    housekeeping_count: int
    draining: int
    trace_status: int
    takeover: bl_takeover_cause

class bl_server_stat_init(TypedDict, total=False):
    epoch: int
    call_count: int
    error_count: int
    key_count: int
    torn_count: int
    quota_call_count: int
    quota_grant_count: int
    quota_pin_count: int
    quantum_request_max: int
    quantum_key_max: int
    wait_request_max: int
    wait_key_max: int
    attach_count: int
    end_count: int
    live_count: int
    inherited_count: int
    watched_count: int
    housekeeping_count: int
    draining: int
    trace_status: int
    takeover: bl_takeover_cause | bl_takeover_cause_init

class bl_calls(CStruct):
    call_count: int
    error_count: int

class bl_calls_init(TypedDict, total=False):
    call_count: int
    error_count: int

class bl_index_stat(CStruct):
    block_count: int
    block_count_max: int
    block_bytes: int
    grant_count: int
    pinned_count: int
    lookup_count: int
    hit_count: int
    commit_count: int
    abort_count: int
    evict_count: int
    table_evict_count: int
    remove_count: int
    refuse_count: int
    damaged_count: int
    stripe_count: int
    free_stripe_count: int
    retired_stripe_count: int
    extent_count: int
    data_bytes: int
    used_bytes: int
    free_bytes: int
    held_bytes: int
    retired_bytes: int
    free_run_bytes: int

class bl_index_stat_init(TypedDict, total=False):
    block_count: int
    block_count_max: int
    block_bytes: int
    grant_count: int
    pinned_count: int
    lookup_count: int
    hit_count: int
    commit_count: int
    abort_count: int
    evict_count: int
    table_evict_count: int
    remove_count: int
    refuse_count: int
    damaged_count: int
    stripe_count: int
    free_stripe_count: int
    retired_stripe_count: int
    extent_count: int
    data_bytes: int
    used_bytes: int
    free_bytes: int
    held_bytes: int
    retired_bytes: int
    free_run_bytes: int

class bl_tenant(CStruct):
    fingerprint: int
    length: int
    block_count: int
    block_bytes: int
    commit_count: int
    hit_count: int
    evict_count: int

class bl_tenant_init(TypedDict, total=False):
    fingerprint: int
    length: int
    block_count: int
    block_bytes: int
    commit_count: int
    hit_count: int
    evict_count: int

class bl_share_view(CStruct):
    bytes: int
    used_bytes: int
    blocks: int
    evictions: int
    hint_bytes: int
    hinted_bytes: int

class bl_share_view_init(TypedDict, total=False):
    bytes: int
    used_bytes: int
    blocks: int
    evictions: int
    hint_bytes: int
    hinted_bytes: int

class bl_hint_stat(CStruct):
    hint_count: int
    favored_bytes: int
    given_count: int
    absent_count: int
    refuse_count: int
    expire_count: int

class bl_hint_stat_init(TypedDict, total=False):
    hint_count: int
    favored_bytes: int
    given_count: int
    absent_count: int
    refuse_count: int
    expire_count: int

class bl_lower_stat(CStruct):
    name_count: int
    dirty_count: int
    wanted_count: int
    onboard_count: int
    unsaved_count: int
    removal_count: int
    removal_failed: int
    removal_parked: int
    removal_max: int
    tier_count: int

class bl_lower_stat_init(TypedDict, total=False):
    name_count: int
    dirty_count: int
    wanted_count: int
    onboard_count: int
    unsaved_count: int
    removal_count: int
    removal_failed: int
    removal_parked: int
    removal_max: int
    tier_count: int

class bl_client_figures(CStruct):
    requested_blocks: int
    hit_blocks: int
    stored_blocks: int
    present_blocks: int
    refused_blocks: int
    read_bytes: int
    written_bytes: int
    flushed_bytes: int
    mismatches: int
    checksum_failures: int
    saved_tokens: int
    saved_ns: int

class bl_client_figures_init(TypedDict, total=False):
    requested_blocks: int
    hit_blocks: int
    stored_blocks: int
    present_blocks: int
    refused_blocks: int
    read_bytes: int
    written_bytes: int
    flushed_bytes: int
    mismatches: int
    checksum_failures: int
    saved_tokens: int
    saved_ns: int

class bl_pool(CStruct): ...

class bl_pool_config(CStruct):
    pool_id: uint8_p
    device_size: int
    created_s: int
    device_count: int
    interleaved: int
    lane_count: int
    slot_count: int
    bulk_size: int
    block_count_max: int
    sparse: int

class bl_pool_config_init(TypedDict, total=False):
    pool_id: uint8_p | bytes | Sequence[int]
    device_size: int
    created_s: int
    device_count: int
    interleaved: int
    lane_count: int
    slot_count: int
    bulk_size: int
    block_count_max: int
    sparse: int

class bl_call(CStruct):
    request: uint8_p | Null
    reply: uint8_p | Null
    request_size: int
    reply_capacity: int
    reply_size: int
    lane: int
    method: int

class bl_call_init(TypedDict, total=False):
    request: uint8_p | Null
    reply: uint8_p | Null
    request_size: int
    reply_capacity: int
    reply_size: int
    lane: int
    method: int

class bl_server(CStruct): ...

class bl_quota(CStruct):
    bytes: int
    grant_count: int
    pin_count: int
    calls_per_s: int
    reserved: int

class bl_quota_init(TypedDict, total=False):
    bytes: int
    grant_count: int
    pin_count: int
    calls_per_s: int
    reserved: int

class bl_session(CStruct): ...

class bl_session_stat(CStruct):
    epoch: int
    nonce: int
    call_count: int
    reattach_count: int
    mismatch_count: int
    checksum_count: int
    lane: int
    reserved: int

class bl_session_stat_init(TypedDict, total=False):
    epoch: int
    nonce: int
    call_count: int
    reattach_count: int
    mismatch_count: int
    checksum_count: int
    lane: int
    reserved: int

class bl_message(CStruct):
    request: uint8_p | Null
    reply: uint8_p | Null
    reply_size: uint32_p | Null
    request_size: int
    reply_capacity: int
    method: int

class bl_message_init(TypedDict, total=False):
    request: uint8_p | Null
    reply: uint8_p | Null
    reply_size: uint32_p | Null
    request_size: int
    reply_capacity: int
    method: int

class bl_pump(CStruct):
    requests: uint8_p | Null
    replies: uint8_p | Null
    latencies_ns: uint64_p | Null
    count: int
    size: int
    depth: int
    method: int
    reserved: int

class bl_pump_init(TypedDict, total=False):
    requests: uint8_p | Null
    replies: uint8_p | Null
    latencies_ns: uint64_p | Null
    count: int
    size: int
    depth: int
    method: int
    reserved: int

class bl_function_call(CStruct):
    request: uint8_p | Null
    nonce: int
    request_size: int
    lane: int
    number: int
    reserved: int

class bl_function_call_init(TypedDict, total=False):
    request: uint8_p | Null
    nonce: int
    request_size: int
    lane: int
    number: int
    reserved: int

class bl_report(CStruct):
    kind: int
    figures: uint64_p

class bl_report_init(TypedDict, total=False):
    kind: int
    figures: uint64_p | Sequence[int]

class bl_trace_clocks(CStruct):
    ticks: int
    monotonic_ns: int
    realtime_ns: int

class bl_trace_clocks_init(TypedDict, total=False):
    ticks: int
    monotonic_ns: int
    realtime_ns: int

class bl_trace_head(CStruct):
    magic: char_p
    entry_size: int
    entry_count: int
    epoch: int
    pid: int
    ended: int
    takeover: bl_takeover_cause
    first: bl_trace_clocks
    last: bl_trace_clocks

class bl_trace_head_init(TypedDict, total=False):
    magic: char_p | bytes | Sequence[bytes]
    entry_size: int
    entry_count: int
    epoch: int
    pid: int
    ended: int
    takeover: bl_takeover_cause | bl_takeover_cause_init
    first: bl_trace_clocks | bl_trace_clocks_init
    last: bl_trace_clocks | bl_trace_clocks_init

class bl_trace_entry(CStruct):
    ended: int
    ticks: int
    ticks_taken: int
    nonce: int
    request_size: int
    reply_size: int
    status: int
    pid: int
    keys: int
    method: int
    lane: int
    host: int
    sequence: int

class bl_trace_entry_init(TypedDict, total=False):
    ended: int
    ticks: int
    ticks_taken: int
    nonce: int
    request_size: int
    reply_size: int
    status: int
    pid: int
    keys: int
    method: int
    lane: int
    host: int
    sequence: int

class bl_index(CStruct): ...

class bl_share_rule(CStruct):
    value: int
    mask: int
    share: int
    reserved: int

class bl_share_rule_init(TypedDict, total=False):
    value: int
    mask: int
    share: int
    reserved: int

class bl_map_cell(CStruct):
    used_bytes: int
    held_bytes: int
    stripe_count: int
    free_count: int
    table_count: int
    retired_count: int
    kept_count: int
    reserved: int

class bl_map_cell_init(TypedDict, total=False):
    used_bytes: int
    held_bytes: int
    stripe_count: int
    free_count: int
    table_count: int
    retired_count: int
    kept_count: int
    reserved: int

class bl_session_view(CStruct):
    nonce: int
    epoch: int
    since_ns: int
    heartbeat_ns: int
    call_count: int
    bytes: int
    held_bytes: int
    lane: int
    host: int
    pid: int
    kind: int
    state: int
    trust: int
    grant_count: int
    pin_count: int

class bl_session_view_init(TypedDict, total=False):
    nonce: int
    epoch: int
    since_ns: int
    heartbeat_ns: int
    call_count: int
    bytes: int
    held_bytes: int
    lane: int
    host: int
    pid: int
    kind: int
    state: int
    trust: int
    grant_count: int
    pin_count: int

class bl_sessions_reply(CStruct):
    count: int
    more: int
    draining: int
    pid: int
    quota: bl_quota

class bl_sessions_reply_init(TypedDict, total=False):
    count: int
    more: int
    draining: int
    pid: int
    quota: bl_quota | bl_quota_init

class bl_change(CStruct):
    generation: int
    block: int
    kind: int
    name: bl_name

class bl_change_init(TypedDict, total=False):
    generation: int
    block: int
    kind: int
    name: bl_name | bl_name_init

class bl_events(CStruct): ...

class bl_event(CStruct):
    name: bl_name
    kind: int
    joins: int

class bl_event_init(TypedDict, total=False):
    name: bl_name | bl_name_init
    kind: int
    joins: int

class bl_io_queue(CStruct): ...

class bl_tokens(CStruct):
    tail: int
    head: int
    ceil: int
    replenished_ns: int
    rate: int
    limit: int
    threshold: int
    capped: int

class bl_tokens_init(TypedDict, total=False):
    tail: int
    head: int
    ceil: int
    replenished_ns: int
    rate: int
    limit: int
    threshold: int
    capped: int

class bl_node(CStruct):
    accumulated: int
    last: int
    shares: int
    parent: int
    bytes: int
    pieces: int
    bandwidth: bl_tokens

class bl_node_init(TypedDict, total=False):
    accumulated: int
    last: int
    shares: int
    parent: int
    bytes: int
    pieces: int
    bandwidth: bl_tokens | bl_tokens_init

class bl_member(CStruct):
    owner: int
    started: int
    pids: int
    seen_ns: int
    turn: int
    held: int
    pending: int
    demand: int
    until_ns: int

class bl_member_init(TypedDict, total=False):
    owner: int
    started: int
    pids: int
    seen_ns: int
    turn: int
    held: int
    pending: int
    demand: int
    until_ns: int

class bl_direction(CStruct):
    magic: int
    node_count: int
    forgiving: int
    owner_count: int
    member_count: int
    suspect: int
    reaped_ns: int
    used: int
    reaped: int
    audited: int
    bucket: bl_tokens
    nodes: bl_node
    members: bl_member

class bl_direction_init(TypedDict, total=False):
    magic: int
    node_count: int
    forgiving: int
    owner_count: int
    member_count: int
    suspect: int
    reaped_ns: int
    used: int
    reaped: int
    audited: int
    bucket: bl_tokens | bl_tokens_init
    nodes: bl_node | Sequence[bl_node | bl_node_init]
    members: bl_member | Sequence[bl_member | bl_member_init]

class bl_queue(CStruct): ...

class bl_admission(CStruct):
    id: int
    waiter: int
    queued_ns: int
    bytes: int
    node: int

class bl_admission_init(TypedDict, total=False):
    id: int
    waiter: int
    queued_ns: int
    bytes: int
    node: int

class bl_queue_stat(CStruct):
    queued: int
    in_flight: int
    pending: int
    polls: int
    yields: int
    lost: int
    stalls: int
    stalled_ns: int
    stall_ns: int
    flow_ratio: float

class bl_queue_stat_init(TypedDict, total=False):
    queued: int
    in_flight: int
    pending: int
    polls: int
    yields: int
    lost: int
    stalls: int
    stalled_ns: int
    stall_ns: int
    flow_ratio: float

class bl_price(CStruct):
    byte_ps: double_p
    piece_ps: double_p
    device_byte_ps: float
    device_piece_ps: float
    piece_size: int
    piece_count: int

class bl_price_init(TypedDict, total=False):
    byte_ps: double_p | Sequence[float]
    piece_ps: double_p | Sequence[float]
    device_byte_ps: float
    device_piece_ps: float
    piece_size: int
    piece_count: int

class bl_transfer_stats(CStruct):
    pieces: int
    bytes: int
    waited_ns: int
    longest_ns: int
    unthrottled: int

class bl_transfer_stats_init(TypedDict, total=False):
    pieces: int
    bytes: int
    waited_ns: int
    longest_ns: int
    unthrottled: int

class bl_io_request(CStruct):
    bytes: int
    waiter: int
    since_ns: int
    node: int
    direction: int
    again: int
    state: int
    coming: int

class bl_io_request_init(TypedDict, total=False):
    bytes: int
    waiter: int
    since_ns: int
    node: int
    direction: int
    again: int
    state: int
    coming: int

class bl_fragment(CStruct):
    address: int
    size: int

class bl_fragment_init(TypedDict, total=False):
    address: int
    size: int

class bl_piece(CStruct):
    address: int
    offset: int
    length: int
    chunk: int

class bl_piece_init(TypedDict, total=False):
    address: int
    offset: int
    length: int
    chunk: int

class bl_chunk(CStruct):
    offset: int
    length: int
    first: int

class bl_chunk_init(TypedDict, total=False):
    offset: int
    length: int
    first: int

class bl_plan(CStruct):
    pieces: bl_piece | Null
    chunks: bl_chunk | Null
    checksums: uint32_p | Null
    piece_count: int
    chunk_count: int
    piece_base: int
    chunk_base: int
    sparse: int
    reserved: int

class bl_plan_init(TypedDict, total=False):
    pieces: bl_piece | Null
    chunks: bl_chunk | Null
    checksums: uint32_p | Null
    piece_count: int
    chunk_count: int
    piece_base: int
    chunk_base: int
    sparse: int
    reserved: int

class bl_span(CStruct):
    pool: int
    engine: int
    length: int
    power: int
    extra: int
    chunk: int

class bl_span_init(TypedDict, total=False):
    pool: int
    engine: int
    length: int
    power: int
    extra: int
    chunk: int

class bl_windows(CStruct):
    pool: bl_pool | Null
    bases: uint64_p | Null
    window_count: int
    window_shift: int

class bl_windows_init(TypedDict, total=False):
    pool: bl_pool | Null
    bases: uint64_p | Null
    window_count: int
    window_shift: int

class bl_copy_settings(CStruct):
    threads: int
    part: int
    window: int
    step: int
    ahead: int
    past: int
    head: int
    direct: int

class bl_copy_settings_init(TypedDict, total=False):
    threads: int
    part: int
    window: int
    step: int
    ahead: int
    past: int
    head: int
    direct: int

class bl_store(CStruct): ...

class bl_store_record(CStruct):
    key: uint64_p
    fingerprint: int
    length: int
    chunk_size: int

class bl_store_record_init(TypedDict, total=False):
    key: uint64_p | Sequence[int]
    fingerprint: int
    length: int
    chunk_size: int

class bl_store_place(CStruct):
    offset: int
    slot: int
    size: int
    seed: int
    crc: int
    state: int
    length: int

class bl_store_place_init(TypedDict, total=False):
    offset: int
    slot: int
    size: int
    seed: int
    crc: int
    state: int
    length: int

class bl_store_stat(CStruct):
    block_count: int
    block_bytes: int
    used_bytes: int
    data_bytes: int
    slot_count: int
    evicted_count: int
    damaged_count: int
    dirty_count: int

class bl_store_stat_init(TypedDict, total=False):
    block_count: int
    block_bytes: int
    used_bytes: int
    data_bytes: int
    slot_count: int
    evicted_count: int
    damaged_count: int
    dirty_count: int

class bl_disk(CStruct): ...

class bl_disk_request(CStruct):
    offset: int
    bytes: uint8_p | Null
    size: int
    length: int
    seed: int
    crc: int
    result: int
    reserved: int
    source: uint8_p | Null

class bl_disk_request_init(TypedDict, total=False):
    offset: int
    bytes: uint8_p | Null
    size: int
    length: int
    seed: int
    crc: int
    result: int
    reserved: int
    source: uint8_p | Null

class bl_kv_batch(CStruct):
    keys: uint64_p | Null
    fragments: bl_fragment | Null
    names: bl_name | Null
    records: bl_block_record | Null
    fingerprint: int
    timeout_ns: int
    count: int
    fragment_count: int
    length: int
    chunk_size: int
    check_checksums: int
    settings: bl_copy_settings | Null
    io_queue: bl_io_queue | Null
    transfer_class: int
    reserve_flags: int

class bl_kv_batch_init(TypedDict, total=False):
    keys: uint64_p | Null
    fragments: bl_fragment | Null
    names: bl_name | Null
    records: bl_block_record | Null
    fingerprint: int
    timeout_ns: int
    count: int
    fragment_count: int
    length: int
    chunk_size: int
    check_checksums: int
    settings: bl_copy_settings | Null
    io_queue: bl_io_queue | Null
    transfer_class: int
    reserve_flags: int

class bl_kv_pending(CStruct): ...

class bl_finding(CStruct):
    kind: int
    reserved: int
    place: int
    detail: int

class bl_finding_init(TypedDict, total=False):
    kind: int
    reserved: int
    place: int
    detail: int

class bl_check_report(CStruct):
    epoch: int
    block_count: int
    block_bytes: int
    extent_count: int
    session_count: int
    finding_count: int
    serving: int
    half: int
    reserved: int

class bl_check_report_init(TypedDict, total=False):
    epoch: int
    block_count: int
    block_bytes: int
    extent_count: int
    session_count: int
    finding_count: int
    serving: int
    half: int
    reserved: int

class bl_acceptance_config(CStruct):
    duration_ns: int
    patience_ns: int
    role: int
    tests: int
    modes: int
    reserved: int

class bl_acceptance_config_init(TypedDict, total=False):
    duration_ns: int
    patience_ns: int
    role: int
    tests: int
    modes: int
    reserved: int

class bl_acceptance_cell(CStruct):
    trials: int
    violations: int
    rejected: int
    test: int
    mode: int
    initiator: int
    device: int
    place: int
    reserved: int

class bl_acceptance_cell_init(TypedDict, total=False):
    trials: int
    violations: int
    rejected: int
    test: int
    mode: int
    initiator: int
    device: int
    place: int
    reserved: int

class bl_acceptance(CStruct): ...

class bl_prefix(CStruct): ...

class bl_prefix_outcome(CStruct):
    stored: int
    repeated: int
    moved: int
    removed: int
    unknown: int
    evicted: int
    refused: int

class bl_prefix_outcome_init(TypedDict, total=False):
    stored: int
    repeated: int
    moved: int
    removed: int
    unknown: int
    evicted: int
    refused: int

class bl_prefix_match(CStruct):
    rank: int
    device: int
    host: int
    disk: int
    shared: int

class bl_prefix_match_init(TypedDict, total=False):
    rank: int
    device: int
    host: int
    disk: int
    shared: int

class bl_prefix_row(CStruct):
    name: int
    parent: int
    local: int
    block: int
    before: int
    depth: int
    tier: int

class bl_prefix_row_init(TypedDict, total=False):
    name: int
    parent: int
    local: int
    block: int
    before: int
    depth: int
    tier: int

class bl_prefix_stat(CStruct):
    blocks: int
    names: int
    block_max: int
    name_max: int
    evicted: int

class bl_prefix_stat_init(TypedDict, total=False):
    blocks: int
    names: int
    block_max: int
    name_max: int
    evicted: int

class bl_sent(CStruct): ...

class bl_active(CStruct): ...

class bl_load(CStruct):
    request_active_slots: int
    request_total_slots: int
    kv_active_blocks: int
    kv_total_blocks: int
    num_requests_waiting: int
    gpu_cache_usage_perc: float
    gpu_prefix_cache_hit_rate: float
    active_requests: int
    active_prefill_tokens: int
    prefill_s: float
    active_decode_blocks: int
    outstanding_tokens: int

class bl_load_init(TypedDict, total=False):
    request_active_slots: int
    request_total_slots: int
    kv_active_blocks: int
    kv_total_blocks: int
    num_requests_waiting: int
    gpu_cache_usage_perc: float
    gpu_prefix_cache_hit_rate: float
    active_requests: int
    active_prefill_tokens: int
    prefill_s: float
    active_decode_blocks: int
    outstanding_tokens: int

class bl_candidate(CStruct):
    load: bl_load
    device: int
    host: int
    disk: int
    shared: int
    new_blocks: int
    held_alone: float
    taint_weight: float

class bl_candidate_init(TypedDict, total=False):
    load: bl_load | bl_load_init
    device: int
    host: int
    disk: int
    shared: int
    new_blocks: int
    held_alone: float
    taint_weight: float

class bl_prefills(CStruct):
    count: int
    unpredicted: int
    tokens: int
    seconds: float
    oldest_tokens: int
    oldest_predicted: int
    oldest_s: float
    oldest_since: float

class bl_prefills_init(TypedDict, total=False):
    count: int
    unpredicted: int
    tokens: int
    seconds: float
    oldest_tokens: int
    oldest_predicted: int
    oldest_s: float
    oldest_since: float

class bl_load_share(CStruct):
    active_requests: int
    active_decode_blocks: int
    outstanding_tokens: int
    prefills: bl_prefills
    reserved: int64_p

class bl_load_share_init(TypedDict, total=False):
    active_requests: int
    active_decode_blocks: int
    outstanding_tokens: int
    prefills: bl_prefills | bl_prefills_init
    reserved: int64_p | Sequence[int]

class bl_load_table(CStruct):
    rows: bl_load_share | Null
    process_count: int
    slot_count: int
    process: int
    reserved: int

class bl_load_table_init(TypedDict, total=False):
    rows: bl_load_share | Null
    process_count: int
    slot_count: int
    process: int
    reserved: int

class bl_costs(CStruct):
    a: float
    b: float
    c: float
    e: float
    f: float
    g: float
    h: float
    bytes_per_s: float
    host_bytes_per_s: float
    step_tokens: int
    block_tokens: int
    block_bytes: int

class bl_costs_init(TypedDict, total=False):
    a: float
    b: float
    c: float
    e: float
    f: float
    g: float
    h: float
    bytes_per_s: float
    host_bytes_per_s: float
    step_tokens: int
    block_tokens: int
    block_bytes: int

class bl_estimate(CStruct):
    queue_s: float
    prefill_s: float
    transfer_s: float
    between_tokens_s: float

class bl_estimate_init(TypedDict, total=False):
    queue_s: float
    prefill_s: float
    transfer_s: float
    between_tokens_s: float

class bl_pressure(CStruct):
    tail: int
    device_blocks: int
    ended: int
    answer_s: float
    reuse: float
    typical_square: float
    change_sum: float

class bl_pressure_init(TypedDict, total=False):
    tail: int
    device_blocks: int
    ended: int
    answer_s: float
    reuse: float
    typical_square: float
    change_sum: float

class bl_hash(CStruct): ...

class bl_tier(CStruct): ...

class bl_tier_stat(CStruct):
    present: int
    held: int
    reserved: int
    evicted: int
    favored: int

class bl_tier_stat_init(TypedDict, total=False):
    present: int
    held: int
    reserved: int
    evicted: int
    favored: int

class bl_dsa_descriptor(CStruct):
    pasid_privilege: int
    flags_opcode: int
    record: int
    source: int
    pattern: int
    list: int
    target: int
    source2: int
    size: int
    count: int
    interrupt: int
    reserved: int
    expected: int
    target2: int
    seed: int
    seed_reserved: int
    seed_address: int
    specific: uint8_p

class bl_dsa_descriptor_init(TypedDict, total=False):
    pasid_privilege: int
    flags_opcode: int
    record: int
    source: int
    pattern: int
    list: int
    target: int
    source2: int
    size: int
    count: int
    interrupt: int
    reserved: int
    expected: int
    target2: int
    seed: int
    seed_reserved: int
    seed_address: int
    specific: uint8_p | bytes | Sequence[int]

class bl_dsa_record(CStruct):
    status: int
    result: int
    reserved: int
    completed: int
    fault_address: int
    invalid_flags: int
    crc: int
    specific: uint8_p

class bl_dsa_record_init(TypedDict, total=False):
    status: int
    result: int
    reserved: int
    completed: int
    fault_address: int
    invalid_flags: int
    crc: int
    specific: uint8_p | bytes | Sequence[int]

class bl_dsa_queue(CStruct): ...

class bl_dsa_limits(CStruct):
    size_max: int
    batch_max: int
    depth: int
    block_on_fault: int
    reserved: int

class bl_dsa_limits_init(TypedDict, total=False):
    size_max: int
    batch_max: int
    depth: int
    block_on_fault: int
    reserved: int

class bl_dsa_engine(CStruct): ...

class bl_dsa_transfer(CStruct): ...

class bl_dsa_rules(CStruct):
    after_write: int
    before_read: int
    write_to_cache: int
    reserved: int

class bl_dsa_rules_init(TypedDict, total=False):
    after_write: int
    before_read: int
    write_to_cache: int
    reserved: int

class bl_dsa_stat(CStruct):
    descriptors: int
    batches: int
    full: int
    faults: int
    by_cpu: int

class bl_dsa_stat_init(TypedDict, total=False):
    descriptors: int
    batches: int
    full: int
    faults: int
    by_cpu: int

_Type = Literal[
    "char",
    "uint8_t",
    "uint16_t",
    "uint32_t",
    "uint64_t",
    "int32_t",
    "int64_t",
    "size_t",
    "uintptr_t",
    "double",
    "bl_geometry",
    "bl_superblock",
    "bl_epoch_line",
    "bl_candidate_line",
    "bl_heartbeat_line",
    "bl_lobby_request",
    "bl_lobby_reply",
    "bl_doorbell",
    "bl_session_line",
    "bl_request",
    "bl_reply",
    "bl_bulk",
    "bl_block_request",
    "bl_task_request",
    "bl_task",
    "bl_task_counts",
    "bl_lower_request",
    "bl_lower_record",
    "bl_lower_note",
    "bl_retire_request",
    "bl_block_reply",
    "bl_block_record",
    "bl_commit",
    "bl_name",
    "bl_named_commit",
    "bl_entry",
    "bl_name_line",
    "bl_extent_line",
    "bl_takeover_cause",
    "bl_server_stat",
    "bl_calls",
    "bl_index_stat",
    "bl_tenant",
    "bl_share_view",
    "bl_hint_stat",
    "bl_lower_stat",
    "bl_client_figures",
    "bl_pool_config",
    "bl_call",
    "bl_quota",
    "bl_session_stat",
    "bl_message",
    "bl_pump",
    "bl_function_call",
    "bl_report",
    "bl_trace_clocks",
    "bl_trace_head",
    "bl_trace_entry",
    "bl_share_rule",
    "bl_map_cell",
    "bl_session_view",
    "bl_sessions_reply",
    "bl_change",
    "bl_event",
    "bl_tokens",
    "bl_node",
    "bl_member",
    "bl_direction",
    "bl_admission",
    "bl_queue_stat",
    "bl_price",
    "bl_transfer_stats",
    "bl_io_request",
    "bl_fragment",
    "bl_piece",
    "bl_chunk",
    "bl_plan",
    "bl_span",
    "bl_windows",
    "bl_copy_settings",
    "bl_store_record",
    "bl_store_place",
    "bl_store_stat",
    "bl_disk_request",
    "bl_kv_batch",
    "bl_finding",
    "bl_check_report",
    "bl_acceptance_config",
    "bl_acceptance_cell",
    "bl_prefix_outcome",
    "bl_prefix_match",
    "bl_prefix_row",
    "bl_prefix_stat",
    "bl_load",
    "bl_candidate",
    "bl_prefills",
    "bl_load_share",
    "bl_load_table",
    "bl_costs",
    "bl_estimate",
    "bl_pressure",
    "bl_tier_stat",
    "bl_dsa_descriptor",
    "bl_dsa_record",
    "bl_dsa_limits",
    "bl_dsa_rules",
    "bl_dsa_stat",
]
_C = TypeVar("_C", bound=CData)
_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])

class Ffi:
    NULL: Final[Null]
    errno: int

    def sizeof(self, what: _Type | CData, /) -> int: ...
    def typeof(self, kind: str, /) -> Any: ...
    def offsetof(self, kind: _Type, /, *fields: str | int) -> int: ...
    def string(self, text: char_p, maxlen: int = ...) -> bytes: ...
    def unpack(self, pointer: CItems[_T], length: int) -> Sequence[_T]: ...
    def buffer(self, pointer: CData, size: int = ...) -> CBuffer: ...
    def memmove(self, target: CData | BufferLike, source: CData | BufferLike, n: int) -> None: ...
    def gc(self, pointer: _C, destructor: Callable[[_C], object], size: int = ...) -> _C: ...
    def new_handle(self, what: object, /) -> void_p: ...
    def from_handle(self, handle: CData, /) -> Any: ...  # whatever new_handle() was given
    def addressof(self, library: Lib, name: str, /) -> void_p: ...
    def def_extern(
        self, name: str = ..., error: int = ..., onerror: Callable[..., object] | None = ...
    ) -> Callable[[_F], _F]: ...
    @overload
    def from_buffer(self, buffer: BufferLike, /) -> char_p: ...
    @overload
    def from_buffer(self, of: Literal["char[]"], buffer: BufferLike, require_writable: bool = ...) -> char_p: ...
    @overload
    def from_buffer(self, of: Literal["uint8_t[]"], buffer: BufferLike, require_writable: bool = ...) -> uint8_p: ...
    @overload
    def from_buffer(self, of: Literal["uint16_t[]"], buffer: BufferLike, require_writable: bool = ...) -> uint16_p: ...
    @overload
    def from_buffer(self, of: Literal["uint32_t[]"], buffer: BufferLike, require_writable: bool = ...) -> uint32_p: ...
    @overload
    def from_buffer(self, of: Literal["uint64_t[]"], buffer: BufferLike, require_writable: bool = ...) -> uint64_p: ...
    @overload
    def from_buffer(self, of: Literal["int32_t[]"], buffer: BufferLike, require_writable: bool = ...) -> int32_p: ...
    @overload
    def from_buffer(self, of: Literal["int64_t[]"], buffer: BufferLike, require_writable: bool = ...) -> int64_p: ...
    @overload
    def from_buffer(self, of: Literal["double[]"], buffer: BufferLike, require_writable: bool = ...) -> double_p: ...
    @overload
    def from_buffer(self, of: Literal["bl_geometry[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_geometry: ...
    @overload
    def from_buffer(self, of: Literal["bl_superblock[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_superblock: ...
    @overload
    def from_buffer(self, of: Literal["bl_epoch_line[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_epoch_line: ...
    @overload
    def from_buffer(self, of: Literal["bl_candidate_line[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_candidate_line: ...
    @overload
    def from_buffer(self, of: Literal["bl_heartbeat_line[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_heartbeat_line: ...
    @overload
    def from_buffer(self, of: Literal["bl_lobby_request[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_lobby_request: ...
    @overload
    def from_buffer(self, of: Literal["bl_lobby_reply[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_lobby_reply: ...
    @overload
    def from_buffer(self, of: Literal["bl_doorbell[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_doorbell: ...
    @overload
    def from_buffer(self, of: Literal["bl_session_line[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_session_line: ...
    @overload
    def from_buffer(self, of: Literal["bl_request[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_request: ...
    @overload
    def from_buffer(self, of: Literal["bl_reply[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_reply: ...
    @overload
    def from_buffer(self, of: Literal["bl_bulk[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_bulk: ...
    @overload
    def from_buffer(self, of: Literal["bl_block_request[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_block_request: ...
    @overload
    def from_buffer(self, of: Literal["bl_task_request[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_task_request: ...
    @overload
    def from_buffer(self, of: Literal["bl_task[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_task: ...
    @overload
    def from_buffer(self, of: Literal["bl_task_counts[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_task_counts: ...
    @overload
    def from_buffer(self, of: Literal["bl_lower_request[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_lower_request: ...
    @overload
    def from_buffer(self, of: Literal["bl_lower_record[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_lower_record: ...
    @overload
    def from_buffer(self, of: Literal["bl_lower_note[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_lower_note: ...
    @overload
    def from_buffer(self, of: Literal["bl_retire_request[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_retire_request: ...
    @overload
    def from_buffer(self, of: Literal["bl_block_reply[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_block_reply: ...
    @overload
    def from_buffer(self, of: Literal["bl_block_record[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_block_record: ...
    @overload
    def from_buffer(self, of: Literal["bl_commit[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_commit: ...
    @overload
    def from_buffer(self, of: Literal["bl_name[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_name: ...
    @overload
    def from_buffer(self, of: Literal["bl_named_commit[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_named_commit: ...
    @overload
    def from_buffer(self, of: Literal["bl_entry[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_entry: ...
    @overload
    def from_buffer(self, of: Literal["bl_name_line[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_name_line: ...
    @overload
    def from_buffer(self, of: Literal["bl_extent_line[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_extent_line: ...
    @overload
    def from_buffer(self, of: Literal["bl_takeover_cause[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_takeover_cause: ...
    @overload
    def from_buffer(self, of: Literal["bl_server_stat[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_server_stat: ...
    @overload
    def from_buffer(self, of: Literal["bl_calls[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_calls: ...
    @overload
    def from_buffer(self, of: Literal["bl_index_stat[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_index_stat: ...
    @overload
    def from_buffer(self, of: Literal["bl_tenant[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_tenant: ...
    @overload
    def from_buffer(self, of: Literal["bl_share_view[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_share_view: ...
    @overload
    def from_buffer(self, of: Literal["bl_hint_stat[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_hint_stat: ...
    @overload
    def from_buffer(self, of: Literal["bl_lower_stat[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_lower_stat: ...
    @overload
    def from_buffer(self, of: Literal["bl_client_figures[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_client_figures: ...
    @overload
    def from_buffer(self, of: Literal["bl_pool_config[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_pool_config: ...
    @overload
    def from_buffer(self, of: Literal["bl_call[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_call: ...
    @overload
    def from_buffer(self, of: Literal["bl_quota[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_quota: ...
    @overload
    def from_buffer(self, of: Literal["bl_session_stat[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_session_stat: ...
    @overload
    def from_buffer(self, of: Literal["bl_message[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_message: ...
    @overload
    def from_buffer(self, of: Literal["bl_pump[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_pump: ...
    @overload
    def from_buffer(self, of: Literal["bl_function_call[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_function_call: ...
    @overload
    def from_buffer(self, of: Literal["bl_report[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_report: ...
    @overload
    def from_buffer(self, of: Literal["bl_trace_clocks[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_trace_clocks: ...
    @overload
    def from_buffer(self, of: Literal["bl_trace_head[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_trace_head: ...
    @overload
    def from_buffer(self, of: Literal["bl_trace_entry[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_trace_entry: ...
    @overload
    def from_buffer(self, of: Literal["bl_share_rule[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_share_rule: ...
    @overload
    def from_buffer(self, of: Literal["bl_map_cell[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_map_cell: ...
    @overload
    def from_buffer(self, of: Literal["bl_session_view[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_session_view: ...
    @overload
    def from_buffer(self, of: Literal["bl_sessions_reply[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_sessions_reply: ...
    @overload
    def from_buffer(self, of: Literal["bl_change[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_change: ...
    @overload
    def from_buffer(self, of: Literal["bl_event[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_event: ...
    @overload
    def from_buffer(self, of: Literal["bl_tokens[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_tokens: ...
    @overload
    def from_buffer(self, of: Literal["bl_node[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_node: ...
    @overload
    def from_buffer(self, of: Literal["bl_member[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_member: ...
    @overload
    def from_buffer(self, of: Literal["bl_direction[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_direction: ...
    @overload
    def from_buffer(self, of: Literal["bl_admission[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_admission: ...
    @overload
    def from_buffer(self, of: Literal["bl_queue_stat[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_queue_stat: ...
    @overload
    def from_buffer(self, of: Literal["bl_price[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_price: ...
    @overload
    def from_buffer(self, of: Literal["bl_transfer_stats[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_transfer_stats: ...
    @overload
    def from_buffer(self, of: Literal["bl_io_request[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_io_request: ...
    @overload
    def from_buffer(self, of: Literal["bl_fragment[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_fragment: ...
    @overload
    def from_buffer(self, of: Literal["bl_piece[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_piece: ...
    @overload
    def from_buffer(self, of: Literal["bl_chunk[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_chunk: ...
    @overload
    def from_buffer(self, of: Literal["bl_plan[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_plan: ...
    @overload
    def from_buffer(self, of: Literal["bl_span[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_span: ...
    @overload
    def from_buffer(self, of: Literal["bl_windows[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_windows: ...
    @overload
    def from_buffer(self, of: Literal["bl_copy_settings[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_copy_settings: ...
    @overload
    def from_buffer(self, of: Literal["bl_store_record[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_store_record: ...
    @overload
    def from_buffer(self, of: Literal["bl_store_place[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_store_place: ...
    @overload
    def from_buffer(self, of: Literal["bl_store_stat[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_store_stat: ...
    @overload
    def from_buffer(self, of: Literal["bl_disk_request[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_disk_request: ...
    @overload
    def from_buffer(self, of: Literal["bl_kv_batch[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_kv_batch: ...
    @overload
    def from_buffer(self, of: Literal["bl_finding[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_finding: ...
    @overload
    def from_buffer(self, of: Literal["bl_check_report[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_check_report: ...
    @overload
    def from_buffer(self, of: Literal["bl_acceptance_config[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_acceptance_config: ...
    @overload
    def from_buffer(self, of: Literal["bl_acceptance_cell[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_acceptance_cell: ...
    @overload
    def from_buffer(self, of: Literal["bl_prefix_outcome[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_prefix_outcome: ...
    @overload
    def from_buffer(self, of: Literal["bl_prefix_match[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_prefix_match: ...
    @overload
    def from_buffer(self, of: Literal["bl_prefix_row[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_prefix_row: ...
    @overload
    def from_buffer(self, of: Literal["bl_prefix_stat[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_prefix_stat: ...
    @overload
    def from_buffer(self, of: Literal["bl_load[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_load: ...
    @overload
    def from_buffer(self, of: Literal["bl_candidate[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_candidate: ...
    @overload
    def from_buffer(self, of: Literal["bl_prefills[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_prefills: ...
    @overload
    def from_buffer(self, of: Literal["bl_load_share[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_load_share: ...
    @overload
    def from_buffer(self, of: Literal["bl_load_table[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_load_table: ...
    @overload
    def from_buffer(self, of: Literal["bl_costs[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_costs: ...
    @overload
    def from_buffer(self, of: Literal["bl_estimate[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_estimate: ...
    @overload
    def from_buffer(self, of: Literal["bl_pressure[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_pressure: ...
    @overload
    def from_buffer(self, of: Literal["bl_tier_stat[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_tier_stat: ...
    @overload
    def from_buffer(self, of: Literal["bl_dsa_descriptor[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_dsa_descriptor: ...
    @overload
    def from_buffer(self, of: Literal["bl_dsa_record[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_dsa_record: ...
    @overload
    def from_buffer(self, of: Literal["bl_dsa_limits[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_dsa_limits: ...
    @overload
    def from_buffer(self, of: Literal["bl_dsa_rules[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_dsa_rules: ...
    @overload
    def from_buffer(self, of: Literal["bl_dsa_stat[]"], buffer: BufferLike, require_writable: bool = ...) -> bl_dsa_stat: ...
    @overload
    def new(self, of: Literal["char *"], init: bytes = ..., /) -> char_p: ...
    @overload
    def new(self, of: Literal["char[]"], init: int | Sequence[bytes] | bytes = ..., /) -> char_p: ...
    @overload
    def new(self, of: Literal["uint8_t *"], init: int = ..., /) -> uint8_p: ...
    @overload
    def new(self, of: Literal["uint8_t[]"], init: int | Sequence[int] | bytes = ..., /) -> uint8_p: ...
    @overload
    def new(self, of: Literal["uint16_t *"], init: int = ..., /) -> uint16_p: ...
    @overload
    def new(self, of: Literal["uint16_t[]"], init: int | Sequence[int] = ..., /) -> uint16_p: ...
    @overload
    def new(self, of: Literal["uint32_t *"], init: int = ..., /) -> uint32_p: ...
    @overload
    def new(self, of: Literal["uint32_t[]"], init: int | Sequence[int] = ..., /) -> uint32_p: ...
    @overload
    def new(self, of: Literal["uint64_t *"], init: int = ..., /) -> uint64_p: ...
    @overload
    def new(self, of: Literal["uint64_t[]"], init: int | Sequence[int] = ..., /) -> uint64_p: ...
    @overload
    def new(self, of: Literal["int32_t *"], init: int = ..., /) -> int32_p: ...
    @overload
    def new(self, of: Literal["int32_t[]"], init: int | Sequence[int] = ..., /) -> int32_p: ...
    @overload
    def new(self, of: Literal["int64_t *"], init: int = ..., /) -> int64_p: ...
    @overload
    def new(self, of: Literal["int64_t[]"], init: int | Sequence[int] = ..., /) -> int64_p: ...
    @overload
    def new(self, of: Literal["double *"], init: float = ..., /) -> double_p: ...
    @overload
    def new(self, of: Literal["double[]"], init: int | Sequence[float] = ..., /) -> double_p: ...
    @overload
    def new(self, of: Literal["bl_geometry *"], init: bl_geometry | bl_geometry_init = ..., /) -> bl_geometry: ...
    @overload
    def new(self, of: Literal["bl_geometry[]"], init: int | Sequence[bl_geometry | bl_geometry_init] = ..., /) -> bl_geometry: ...
    @overload
    def new(self, of: Literal["bl_superblock *"], init: bl_superblock | bl_superblock_init = ..., /) -> bl_superblock: ...
    @overload
    def new(self, of: Literal["bl_superblock[]"], init: int | Sequence[bl_superblock | bl_superblock_init] = ..., /) -> bl_superblock: ...
    @overload
    def new(self, of: Literal["bl_epoch_line *"], init: bl_epoch_line | bl_epoch_line_init = ..., /) -> bl_epoch_line: ...
    @overload
    def new(self, of: Literal["bl_epoch_line[]"], init: int | Sequence[bl_epoch_line | bl_epoch_line_init] = ..., /) -> bl_epoch_line: ...
    @overload
    def new(self, of: Literal["bl_candidate_line *"], init: bl_candidate_line | bl_candidate_line_init = ..., /) -> bl_candidate_line: ...
    @overload
    def new(self, of: Literal["bl_candidate_line[]"], init: int | Sequence[bl_candidate_line | bl_candidate_line_init] = ..., /) -> bl_candidate_line: ...
    @overload
    def new(self, of: Literal["bl_heartbeat_line *"], init: bl_heartbeat_line | bl_heartbeat_line_init = ..., /) -> bl_heartbeat_line: ...
    @overload
    def new(self, of: Literal["bl_heartbeat_line[]"], init: int | Sequence[bl_heartbeat_line | bl_heartbeat_line_init] = ..., /) -> bl_heartbeat_line: ...
    @overload
    def new(self, of: Literal["bl_lobby_request *"], init: bl_lobby_request | bl_lobby_request_init = ..., /) -> bl_lobby_request: ...
    @overload
    def new(self, of: Literal["bl_lobby_request[]"], init: int | Sequence[bl_lobby_request | bl_lobby_request_init] = ..., /) -> bl_lobby_request: ...
    @overload
    def new(self, of: Literal["bl_lobby_reply *"], init: bl_lobby_reply | bl_lobby_reply_init = ..., /) -> bl_lobby_reply: ...
    @overload
    def new(self, of: Literal["bl_lobby_reply[]"], init: int | Sequence[bl_lobby_reply | bl_lobby_reply_init] = ..., /) -> bl_lobby_reply: ...
    @overload
    def new(self, of: Literal["bl_doorbell *"], init: bl_doorbell | bl_doorbell_init = ..., /) -> bl_doorbell: ...
    @overload
    def new(self, of: Literal["bl_doorbell[]"], init: int | Sequence[bl_doorbell | bl_doorbell_init] = ..., /) -> bl_doorbell: ...
    @overload
    def new(self, of: Literal["bl_session_line *"], init: bl_session_line | bl_session_line_init = ..., /) -> bl_session_line: ...
    @overload
    def new(self, of: Literal["bl_session_line[]"], init: int | Sequence[bl_session_line | bl_session_line_init] = ..., /) -> bl_session_line: ...
    @overload
    def new(self, of: Literal["bl_request *"], init: bl_request | bl_request_init = ..., /) -> bl_request: ...
    @overload
    def new(self, of: Literal["bl_request[]"], init: int | Sequence[bl_request | bl_request_init] = ..., /) -> bl_request: ...
    @overload
    def new(self, of: Literal["bl_reply *"], init: bl_reply | bl_reply_init = ..., /) -> bl_reply: ...
    @overload
    def new(self, of: Literal["bl_reply[]"], init: int | Sequence[bl_reply | bl_reply_init] = ..., /) -> bl_reply: ...
    @overload
    def new(self, of: Literal["bl_bulk *"], init: bl_bulk | bl_bulk_init = ..., /) -> bl_bulk: ...
    @overload
    def new(self, of: Literal["bl_bulk[]"], init: int | Sequence[bl_bulk | bl_bulk_init] = ..., /) -> bl_bulk: ...
    @overload
    def new(self, of: Literal["bl_block_request *"], init: bl_block_request | bl_block_request_init = ..., /) -> bl_block_request: ...
    @overload
    def new(self, of: Literal["bl_block_request[]"], init: int | Sequence[bl_block_request | bl_block_request_init] = ..., /) -> bl_block_request: ...
    @overload
    def new(self, of: Literal["bl_task_request *"], init: bl_task_request | bl_task_request_init = ..., /) -> bl_task_request: ...
    @overload
    def new(self, of: Literal["bl_task_request[]"], init: int | Sequence[bl_task_request | bl_task_request_init] = ..., /) -> bl_task_request: ...
    @overload
    def new(self, of: Literal["bl_task *"], init: bl_task | bl_task_init = ..., /) -> bl_task: ...
    @overload
    def new(self, of: Literal["bl_task[]"], init: int | Sequence[bl_task | bl_task_init] = ..., /) -> bl_task: ...
    @overload
    def new(self, of: Literal["bl_task_counts *"], init: bl_task_counts | bl_task_counts_init = ..., /) -> bl_task_counts: ...
    @overload
    def new(self, of: Literal["bl_task_counts[]"], init: int | Sequence[bl_task_counts | bl_task_counts_init] = ..., /) -> bl_task_counts: ...
    @overload
    def new(self, of: Literal["bl_lower_request *"], init: bl_lower_request | bl_lower_request_init = ..., /) -> bl_lower_request: ...
    @overload
    def new(self, of: Literal["bl_lower_request[]"], init: int | Sequence[bl_lower_request | bl_lower_request_init] = ..., /) -> bl_lower_request: ...
    @overload
    def new(self, of: Literal["bl_lower_record *"], init: bl_lower_record | bl_lower_record_init = ..., /) -> bl_lower_record: ...
    @overload
    def new(self, of: Literal["bl_lower_record[]"], init: int | Sequence[bl_lower_record | bl_lower_record_init] = ..., /) -> bl_lower_record: ...
    @overload
    def new(self, of: Literal["bl_lower_note *"], init: bl_lower_note | bl_lower_note_init = ..., /) -> bl_lower_note: ...
    @overload
    def new(self, of: Literal["bl_lower_note[]"], init: int | Sequence[bl_lower_note | bl_lower_note_init] = ..., /) -> bl_lower_note: ...
    @overload
    def new(self, of: Literal["bl_retire_request *"], init: bl_retire_request | bl_retire_request_init = ..., /) -> bl_retire_request: ...
    @overload
    def new(self, of: Literal["bl_retire_request[]"], init: int | Sequence[bl_retire_request | bl_retire_request_init] = ..., /) -> bl_retire_request: ...
    @overload
    def new(self, of: Literal["bl_block_reply *"], init: bl_block_reply | bl_block_reply_init = ..., /) -> bl_block_reply: ...
    @overload
    def new(self, of: Literal["bl_block_reply[]"], init: int | Sequence[bl_block_reply | bl_block_reply_init] = ..., /) -> bl_block_reply: ...
    @overload
    def new(self, of: Literal["bl_block_record *"], init: bl_block_record | bl_block_record_init = ..., /) -> bl_block_record: ...
    @overload
    def new(self, of: Literal["bl_block_record[]"], init: int | Sequence[bl_block_record | bl_block_record_init] = ..., /) -> bl_block_record: ...
    @overload
    def new(self, of: Literal["bl_commit *"], init: bl_commit | bl_commit_init = ..., /) -> bl_commit: ...
    @overload
    def new(self, of: Literal["bl_commit[]"], init: int | Sequence[bl_commit | bl_commit_init] = ..., /) -> bl_commit: ...
    @overload
    def new(self, of: Literal["bl_name *"], init: bl_name | bl_name_init = ..., /) -> bl_name: ...
    @overload
    def new(self, of: Literal["bl_name[]"], init: int | Sequence[bl_name | bl_name_init] = ..., /) -> bl_name: ...
    @overload
    def new(self, of: Literal["bl_named_commit *"], init: bl_named_commit | bl_named_commit_init = ..., /) -> bl_named_commit: ...
    @overload
    def new(self, of: Literal["bl_named_commit[]"], init: int | Sequence[bl_named_commit | bl_named_commit_init] = ..., /) -> bl_named_commit: ...
    @overload
    def new(self, of: Literal["bl_entry *"], init: bl_entry | bl_entry_init = ..., /) -> bl_entry: ...
    @overload
    def new(self, of: Literal["bl_entry[]"], init: int | Sequence[bl_entry | bl_entry_init] = ..., /) -> bl_entry: ...
    @overload
    def new(self, of: Literal["bl_name_line *"], init: bl_name_line | bl_name_line_init = ..., /) -> bl_name_line: ...
    @overload
    def new(self, of: Literal["bl_name_line[]"], init: int | Sequence[bl_name_line | bl_name_line_init] = ..., /) -> bl_name_line: ...
    @overload
    def new(self, of: Literal["bl_extent_line *"], init: bl_extent_line | bl_extent_line_init = ..., /) -> bl_extent_line: ...
    @overload
    def new(self, of: Literal["bl_extent_line[]"], init: int | Sequence[bl_extent_line | bl_extent_line_init] = ..., /) -> bl_extent_line: ...
    @overload
    def new(self, of: Literal["bl_takeover_cause *"], init: bl_takeover_cause | bl_takeover_cause_init = ..., /) -> bl_takeover_cause: ...
    @overload
    def new(self, of: Literal["bl_takeover_cause[]"], init: int | Sequence[bl_takeover_cause | bl_takeover_cause_init] = ..., /) -> bl_takeover_cause: ...
    @overload
    def new(self, of: Literal["bl_server_stat *"], init: bl_server_stat | bl_server_stat_init = ..., /) -> bl_server_stat: ...
    @overload
    def new(self, of: Literal["bl_server_stat[]"], init: int | Sequence[bl_server_stat | bl_server_stat_init] = ..., /) -> bl_server_stat: ...
    @overload
    def new(self, of: Literal["bl_calls *"], init: bl_calls | bl_calls_init = ..., /) -> bl_calls: ...
    @overload
    def new(self, of: Literal["bl_calls[]"], init: int | Sequence[bl_calls | bl_calls_init] = ..., /) -> bl_calls: ...
    @overload
    def new(self, of: Literal["bl_index_stat *"], init: bl_index_stat | bl_index_stat_init = ..., /) -> bl_index_stat: ...
    @overload
    def new(self, of: Literal["bl_index_stat[]"], init: int | Sequence[bl_index_stat | bl_index_stat_init] = ..., /) -> bl_index_stat: ...
    @overload
    def new(self, of: Literal["bl_tenant *"], init: bl_tenant | bl_tenant_init = ..., /) -> bl_tenant: ...
    @overload
    def new(self, of: Literal["bl_tenant[]"], init: int | Sequence[bl_tenant | bl_tenant_init] = ..., /) -> bl_tenant: ...
    @overload
    def new(self, of: Literal["bl_share_view *"], init: bl_share_view | bl_share_view_init = ..., /) -> bl_share_view: ...
    @overload
    def new(self, of: Literal["bl_share_view[]"], init: int | Sequence[bl_share_view | bl_share_view_init] = ..., /) -> bl_share_view: ...
    @overload
    def new(self, of: Literal["bl_hint_stat *"], init: bl_hint_stat | bl_hint_stat_init = ..., /) -> bl_hint_stat: ...
    @overload
    def new(self, of: Literal["bl_hint_stat[]"], init: int | Sequence[bl_hint_stat | bl_hint_stat_init] = ..., /) -> bl_hint_stat: ...
    @overload
    def new(self, of: Literal["bl_lower_stat *"], init: bl_lower_stat | bl_lower_stat_init = ..., /) -> bl_lower_stat: ...
    @overload
    def new(self, of: Literal["bl_lower_stat[]"], init: int | Sequence[bl_lower_stat | bl_lower_stat_init] = ..., /) -> bl_lower_stat: ...
    @overload
    def new(self, of: Literal["bl_client_figures *"], init: bl_client_figures | bl_client_figures_init = ..., /) -> bl_client_figures: ...
    @overload
    def new(self, of: Literal["bl_client_figures[]"], init: int | Sequence[bl_client_figures | bl_client_figures_init] = ..., /) -> bl_client_figures: ...
    @overload
    def new(self, of: Literal["bl_pool_config *"], init: bl_pool_config | bl_pool_config_init = ..., /) -> bl_pool_config: ...
    @overload
    def new(self, of: Literal["bl_pool_config[]"], init: int | Sequence[bl_pool_config | bl_pool_config_init] = ..., /) -> bl_pool_config: ...
    @overload
    def new(self, of: Literal["bl_call *"], init: bl_call | bl_call_init = ..., /) -> bl_call: ...
    @overload
    def new(self, of: Literal["bl_call[]"], init: int | Sequence[bl_call | bl_call_init] = ..., /) -> bl_call: ...
    @overload
    def new(self, of: Literal["bl_quota *"], init: bl_quota | bl_quota_init = ..., /) -> bl_quota: ...
    @overload
    def new(self, of: Literal["bl_quota[]"], init: int | Sequence[bl_quota | bl_quota_init] = ..., /) -> bl_quota: ...
    @overload
    def new(self, of: Literal["bl_session_stat *"], init: bl_session_stat | bl_session_stat_init = ..., /) -> bl_session_stat: ...
    @overload
    def new(self, of: Literal["bl_session_stat[]"], init: int | Sequence[bl_session_stat | bl_session_stat_init] = ..., /) -> bl_session_stat: ...
    @overload
    def new(self, of: Literal["bl_message *"], init: bl_message | bl_message_init = ..., /) -> bl_message: ...
    @overload
    def new(self, of: Literal["bl_message[]"], init: int | Sequence[bl_message | bl_message_init] = ..., /) -> bl_message: ...
    @overload
    def new(self, of: Literal["bl_pump *"], init: bl_pump | bl_pump_init = ..., /) -> bl_pump: ...
    @overload
    def new(self, of: Literal["bl_pump[]"], init: int | Sequence[bl_pump | bl_pump_init] = ..., /) -> bl_pump: ...
    @overload
    def new(self, of: Literal["bl_function_call *"], init: bl_function_call | bl_function_call_init = ..., /) -> bl_function_call: ...
    @overload
    def new(self, of: Literal["bl_function_call[]"], init: int | Sequence[bl_function_call | bl_function_call_init] = ..., /) -> bl_function_call: ...
    @overload
    def new(self, of: Literal["bl_report *"], init: bl_report | bl_report_init = ..., /) -> bl_report: ...
    @overload
    def new(self, of: Literal["bl_report[]"], init: int | Sequence[bl_report | bl_report_init] = ..., /) -> bl_report: ...
    @overload
    def new(self, of: Literal["bl_trace_clocks *"], init: bl_trace_clocks | bl_trace_clocks_init = ..., /) -> bl_trace_clocks: ...
    @overload
    def new(self, of: Literal["bl_trace_clocks[]"], init: int | Sequence[bl_trace_clocks | bl_trace_clocks_init] = ..., /) -> bl_trace_clocks: ...
    @overload
    def new(self, of: Literal["bl_trace_head *"], init: bl_trace_head | bl_trace_head_init = ..., /) -> bl_trace_head: ...
    @overload
    def new(self, of: Literal["bl_trace_head[]"], init: int | Sequence[bl_trace_head | bl_trace_head_init] = ..., /) -> bl_trace_head: ...
    @overload
    def new(self, of: Literal["bl_trace_entry *"], init: bl_trace_entry | bl_trace_entry_init = ..., /) -> bl_trace_entry: ...
    @overload
    def new(self, of: Literal["bl_trace_entry[]"], init: int | Sequence[bl_trace_entry | bl_trace_entry_init] = ..., /) -> bl_trace_entry: ...
    @overload
    def new(self, of: Literal["bl_share_rule *"], init: bl_share_rule | bl_share_rule_init = ..., /) -> bl_share_rule: ...
    @overload
    def new(self, of: Literal["bl_share_rule[]"], init: int | Sequence[bl_share_rule | bl_share_rule_init] = ..., /) -> bl_share_rule: ...
    @overload
    def new(self, of: Literal["bl_map_cell *"], init: bl_map_cell | bl_map_cell_init = ..., /) -> bl_map_cell: ...
    @overload
    def new(self, of: Literal["bl_map_cell[]"], init: int | Sequence[bl_map_cell | bl_map_cell_init] = ..., /) -> bl_map_cell: ...
    @overload
    def new(self, of: Literal["bl_session_view *"], init: bl_session_view | bl_session_view_init = ..., /) -> bl_session_view: ...
    @overload
    def new(self, of: Literal["bl_session_view[]"], init: int | Sequence[bl_session_view | bl_session_view_init] = ..., /) -> bl_session_view: ...
    @overload
    def new(self, of: Literal["bl_sessions_reply *"], init: bl_sessions_reply | bl_sessions_reply_init = ..., /) -> bl_sessions_reply: ...
    @overload
    def new(self, of: Literal["bl_sessions_reply[]"], init: int | Sequence[bl_sessions_reply | bl_sessions_reply_init] = ..., /) -> bl_sessions_reply: ...
    @overload
    def new(self, of: Literal["bl_change *"], init: bl_change | bl_change_init = ..., /) -> bl_change: ...
    @overload
    def new(self, of: Literal["bl_change[]"], init: int | Sequence[bl_change | bl_change_init] = ..., /) -> bl_change: ...
    @overload
    def new(self, of: Literal["bl_event *"], init: bl_event | bl_event_init = ..., /) -> bl_event: ...
    @overload
    def new(self, of: Literal["bl_event[]"], init: int | Sequence[bl_event | bl_event_init] = ..., /) -> bl_event: ...
    @overload
    def new(self, of: Literal["bl_tokens *"], init: bl_tokens | bl_tokens_init = ..., /) -> bl_tokens: ...
    @overload
    def new(self, of: Literal["bl_tokens[]"], init: int | Sequence[bl_tokens | bl_tokens_init] = ..., /) -> bl_tokens: ...
    @overload
    def new(self, of: Literal["bl_node *"], init: bl_node | bl_node_init = ..., /) -> bl_node: ...
    @overload
    def new(self, of: Literal["bl_node[]"], init: int | Sequence[bl_node | bl_node_init] = ..., /) -> bl_node: ...
    @overload
    def new(self, of: Literal["bl_member *"], init: bl_member | bl_member_init = ..., /) -> bl_member: ...
    @overload
    def new(self, of: Literal["bl_member[]"], init: int | Sequence[bl_member | bl_member_init] = ..., /) -> bl_member: ...
    @overload
    def new(self, of: Literal["bl_direction *"], init: bl_direction | bl_direction_init = ..., /) -> bl_direction: ...
    @overload
    def new(self, of: Literal["bl_direction[]"], init: int | Sequence[bl_direction | bl_direction_init] = ..., /) -> bl_direction: ...
    @overload
    def new(self, of: Literal["bl_admission *"], init: bl_admission | bl_admission_init = ..., /) -> bl_admission: ...
    @overload
    def new(self, of: Literal["bl_admission[]"], init: int | Sequence[bl_admission | bl_admission_init] = ..., /) -> bl_admission: ...
    @overload
    def new(self, of: Literal["bl_queue_stat *"], init: bl_queue_stat | bl_queue_stat_init = ..., /) -> bl_queue_stat: ...
    @overload
    def new(self, of: Literal["bl_queue_stat[]"], init: int | Sequence[bl_queue_stat | bl_queue_stat_init] = ..., /) -> bl_queue_stat: ...
    @overload
    def new(self, of: Literal["bl_price *"], init: bl_price | bl_price_init = ..., /) -> bl_price: ...
    @overload
    def new(self, of: Literal["bl_price[]"], init: int | Sequence[bl_price | bl_price_init] = ..., /) -> bl_price: ...
    @overload
    def new(self, of: Literal["bl_transfer_stats *"], init: bl_transfer_stats | bl_transfer_stats_init = ..., /) -> bl_transfer_stats: ...
    @overload
    def new(self, of: Literal["bl_transfer_stats[]"], init: int | Sequence[bl_transfer_stats | bl_transfer_stats_init] = ..., /) -> bl_transfer_stats: ...
    @overload
    def new(self, of: Literal["bl_io_request *"], init: bl_io_request | bl_io_request_init = ..., /) -> bl_io_request: ...
    @overload
    def new(self, of: Literal["bl_io_request[]"], init: int | Sequence[bl_io_request | bl_io_request_init] = ..., /) -> bl_io_request: ...
    @overload
    def new(self, of: Literal["bl_fragment *"], init: bl_fragment | bl_fragment_init = ..., /) -> bl_fragment: ...
    @overload
    def new(self, of: Literal["bl_fragment[]"], init: int | Sequence[bl_fragment | bl_fragment_init] = ..., /) -> bl_fragment: ...
    @overload
    def new(self, of: Literal["bl_piece *"], init: bl_piece | bl_piece_init = ..., /) -> bl_piece: ...
    @overload
    def new(self, of: Literal["bl_piece[]"], init: int | Sequence[bl_piece | bl_piece_init] = ..., /) -> bl_piece: ...
    @overload
    def new(self, of: Literal["bl_chunk *"], init: bl_chunk | bl_chunk_init = ..., /) -> bl_chunk: ...
    @overload
    def new(self, of: Literal["bl_chunk[]"], init: int | Sequence[bl_chunk | bl_chunk_init] = ..., /) -> bl_chunk: ...
    @overload
    def new(self, of: Literal["bl_plan *"], init: bl_plan | bl_plan_init = ..., /) -> bl_plan: ...
    @overload
    def new(self, of: Literal["bl_plan[]"], init: int | Sequence[bl_plan | bl_plan_init] = ..., /) -> bl_plan: ...
    @overload
    def new(self, of: Literal["bl_span *"], init: bl_span | bl_span_init = ..., /) -> bl_span: ...
    @overload
    def new(self, of: Literal["bl_span[]"], init: int | Sequence[bl_span | bl_span_init] = ..., /) -> bl_span: ...
    @overload
    def new(self, of: Literal["bl_windows *"], init: bl_windows | bl_windows_init = ..., /) -> bl_windows: ...
    @overload
    def new(self, of: Literal["bl_windows[]"], init: int | Sequence[bl_windows | bl_windows_init] = ..., /) -> bl_windows: ...
    @overload
    def new(self, of: Literal["bl_copy_settings *"], init: bl_copy_settings | bl_copy_settings_init = ..., /) -> bl_copy_settings: ...
    @overload
    def new(self, of: Literal["bl_copy_settings[]"], init: int | Sequence[bl_copy_settings | bl_copy_settings_init] = ..., /) -> bl_copy_settings: ...
    @overload
    def new(self, of: Literal["bl_store_record *"], init: bl_store_record | bl_store_record_init = ..., /) -> bl_store_record: ...
    @overload
    def new(self, of: Literal["bl_store_record[]"], init: int | Sequence[bl_store_record | bl_store_record_init] = ..., /) -> bl_store_record: ...
    @overload
    def new(self, of: Literal["bl_store_place *"], init: bl_store_place | bl_store_place_init = ..., /) -> bl_store_place: ...
    @overload
    def new(self, of: Literal["bl_store_place[]"], init: int | Sequence[bl_store_place | bl_store_place_init] = ..., /) -> bl_store_place: ...
    @overload
    def new(self, of: Literal["bl_store_stat *"], init: bl_store_stat | bl_store_stat_init = ..., /) -> bl_store_stat: ...
    @overload
    def new(self, of: Literal["bl_store_stat[]"], init: int | Sequence[bl_store_stat | bl_store_stat_init] = ..., /) -> bl_store_stat: ...
    @overload
    def new(self, of: Literal["bl_disk_request *"], init: bl_disk_request | bl_disk_request_init = ..., /) -> bl_disk_request: ...
    @overload
    def new(self, of: Literal["bl_disk_request[]"], init: int | Sequence[bl_disk_request | bl_disk_request_init] = ..., /) -> bl_disk_request: ...
    @overload
    def new(self, of: Literal["bl_kv_batch *"], init: bl_kv_batch | bl_kv_batch_init = ..., /) -> bl_kv_batch: ...
    @overload
    def new(self, of: Literal["bl_kv_batch[]"], init: int | Sequence[bl_kv_batch | bl_kv_batch_init] = ..., /) -> bl_kv_batch: ...
    @overload
    def new(self, of: Literal["bl_finding *"], init: bl_finding | bl_finding_init = ..., /) -> bl_finding: ...
    @overload
    def new(self, of: Literal["bl_finding[]"], init: int | Sequence[bl_finding | bl_finding_init] = ..., /) -> bl_finding: ...
    @overload
    def new(self, of: Literal["bl_check_report *"], init: bl_check_report | bl_check_report_init = ..., /) -> bl_check_report: ...
    @overload
    def new(self, of: Literal["bl_check_report[]"], init: int | Sequence[bl_check_report | bl_check_report_init] = ..., /) -> bl_check_report: ...
    @overload
    def new(self, of: Literal["bl_acceptance_config *"], init: bl_acceptance_config | bl_acceptance_config_init = ..., /) -> bl_acceptance_config: ...
    @overload
    def new(self, of: Literal["bl_acceptance_config[]"], init: int | Sequence[bl_acceptance_config | bl_acceptance_config_init] = ..., /) -> bl_acceptance_config: ...
    @overload
    def new(self, of: Literal["bl_acceptance_cell *"], init: bl_acceptance_cell | bl_acceptance_cell_init = ..., /) -> bl_acceptance_cell: ...
    @overload
    def new(self, of: Literal["bl_acceptance_cell[]"], init: int | Sequence[bl_acceptance_cell | bl_acceptance_cell_init] = ..., /) -> bl_acceptance_cell: ...
    @overload
    def new(self, of: Literal["bl_prefix_outcome *"], init: bl_prefix_outcome | bl_prefix_outcome_init = ..., /) -> bl_prefix_outcome: ...
    @overload
    def new(self, of: Literal["bl_prefix_outcome[]"], init: int | Sequence[bl_prefix_outcome | bl_prefix_outcome_init] = ..., /) -> bl_prefix_outcome: ...
    @overload
    def new(self, of: Literal["bl_prefix_match *"], init: bl_prefix_match | bl_prefix_match_init = ..., /) -> bl_prefix_match: ...
    @overload
    def new(self, of: Literal["bl_prefix_match[]"], init: int | Sequence[bl_prefix_match | bl_prefix_match_init] = ..., /) -> bl_prefix_match: ...
    @overload
    def new(self, of: Literal["bl_prefix_row *"], init: bl_prefix_row | bl_prefix_row_init = ..., /) -> bl_prefix_row: ...
    @overload
    def new(self, of: Literal["bl_prefix_row[]"], init: int | Sequence[bl_prefix_row | bl_prefix_row_init] = ..., /) -> bl_prefix_row: ...
    @overload
    def new(self, of: Literal["bl_prefix_stat *"], init: bl_prefix_stat | bl_prefix_stat_init = ..., /) -> bl_prefix_stat: ...
    @overload
    def new(self, of: Literal["bl_prefix_stat[]"], init: int | Sequence[bl_prefix_stat | bl_prefix_stat_init] = ..., /) -> bl_prefix_stat: ...
    @overload
    def new(self, of: Literal["bl_load *"], init: bl_load | bl_load_init = ..., /) -> bl_load: ...
    @overload
    def new(self, of: Literal["bl_load[]"], init: int | Sequence[bl_load | bl_load_init] = ..., /) -> bl_load: ...
    @overload
    def new(self, of: Literal["bl_candidate *"], init: bl_candidate | bl_candidate_init = ..., /) -> bl_candidate: ...
    @overload
    def new(self, of: Literal["bl_candidate[]"], init: int | Sequence[bl_candidate | bl_candidate_init] = ..., /) -> bl_candidate: ...
    @overload
    def new(self, of: Literal["bl_prefills *"], init: bl_prefills | bl_prefills_init = ..., /) -> bl_prefills: ...
    @overload
    def new(self, of: Literal["bl_prefills[]"], init: int | Sequence[bl_prefills | bl_prefills_init] = ..., /) -> bl_prefills: ...
    @overload
    def new(self, of: Literal["bl_load_share *"], init: bl_load_share | bl_load_share_init = ..., /) -> bl_load_share: ...
    @overload
    def new(self, of: Literal["bl_load_share[]"], init: int | Sequence[bl_load_share | bl_load_share_init] = ..., /) -> bl_load_share: ...
    @overload
    def new(self, of: Literal["bl_load_table *"], init: bl_load_table | bl_load_table_init = ..., /) -> bl_load_table: ...
    @overload
    def new(self, of: Literal["bl_load_table[]"], init: int | Sequence[bl_load_table | bl_load_table_init] = ..., /) -> bl_load_table: ...
    @overload
    def new(self, of: Literal["bl_costs *"], init: bl_costs | bl_costs_init = ..., /) -> bl_costs: ...
    @overload
    def new(self, of: Literal["bl_costs[]"], init: int | Sequence[bl_costs | bl_costs_init] = ..., /) -> bl_costs: ...
    @overload
    def new(self, of: Literal["bl_estimate *"], init: bl_estimate | bl_estimate_init = ..., /) -> bl_estimate: ...
    @overload
    def new(self, of: Literal["bl_estimate[]"], init: int | Sequence[bl_estimate | bl_estimate_init] = ..., /) -> bl_estimate: ...
    @overload
    def new(self, of: Literal["bl_pressure *"], init: bl_pressure | bl_pressure_init = ..., /) -> bl_pressure: ...
    @overload
    def new(self, of: Literal["bl_pressure[]"], init: int | Sequence[bl_pressure | bl_pressure_init] = ..., /) -> bl_pressure: ...
    @overload
    def new(self, of: Literal["bl_tier_stat *"], init: bl_tier_stat | bl_tier_stat_init = ..., /) -> bl_tier_stat: ...
    @overload
    def new(self, of: Literal["bl_tier_stat[]"], init: int | Sequence[bl_tier_stat | bl_tier_stat_init] = ..., /) -> bl_tier_stat: ...
    @overload
    def new(self, of: Literal["bl_dsa_descriptor *"], init: bl_dsa_descriptor | bl_dsa_descriptor_init = ..., /) -> bl_dsa_descriptor: ...
    @overload
    def new(self, of: Literal["bl_dsa_descriptor[]"], init: int | Sequence[bl_dsa_descriptor | bl_dsa_descriptor_init] = ..., /) -> bl_dsa_descriptor: ...
    @overload
    def new(self, of: Literal["bl_dsa_record *"], init: bl_dsa_record | bl_dsa_record_init = ..., /) -> bl_dsa_record: ...
    @overload
    def new(self, of: Literal["bl_dsa_record[]"], init: int | Sequence[bl_dsa_record | bl_dsa_record_init] = ..., /) -> bl_dsa_record: ...
    @overload
    def new(self, of: Literal["bl_dsa_limits *"], init: bl_dsa_limits | bl_dsa_limits_init = ..., /) -> bl_dsa_limits: ...
    @overload
    def new(self, of: Literal["bl_dsa_limits[]"], init: int | Sequence[bl_dsa_limits | bl_dsa_limits_init] = ..., /) -> bl_dsa_limits: ...
    @overload
    def new(self, of: Literal["bl_dsa_rules *"], init: bl_dsa_rules | bl_dsa_rules_init = ..., /) -> bl_dsa_rules: ...
    @overload
    def new(self, of: Literal["bl_dsa_rules[]"], init: int | Sequence[bl_dsa_rules | bl_dsa_rules_init] = ..., /) -> bl_dsa_rules: ...
    @overload
    def new(self, of: Literal["bl_dsa_stat *"], init: bl_dsa_stat | bl_dsa_stat_init = ..., /) -> bl_dsa_stat: ...
    @overload
    def new(self, of: Literal["bl_dsa_stat[]"], init: int | Sequence[bl_dsa_stat | bl_dsa_stat_init] = ..., /) -> bl_dsa_stat: ...
    @overload
    def new(self, of: Literal["char **"], init: char_p | Null = ..., /) -> CPointer[char_p]: ...
    @overload
    def new(self, of: Literal["char *[]"], init: int | Sequence[char_p | Null] = ..., /) -> CPointer[char_p]: ...
    @overload
    def new(self, of: Literal["uint8_t **"], init: uint8_p | Null = ..., /) -> CPointer[uint8_p]: ...
    @overload
    def new(self, of: Literal["uint8_t *[]"], init: int | Sequence[uint8_p | Null] = ..., /) -> CPointer[uint8_p]: ...
    @overload
    def new(self, of: Literal["uint16_t **"], init: uint16_p | Null = ..., /) -> CPointer[uint16_p]: ...
    @overload
    def new(self, of: Literal["uint16_t *[]"], init: int | Sequence[uint16_p | Null] = ..., /) -> CPointer[uint16_p]: ...
    @overload
    def new(self, of: Literal["uint32_t **"], init: uint32_p | Null = ..., /) -> CPointer[uint32_p]: ...
    @overload
    def new(self, of: Literal["uint32_t *[]"], init: int | Sequence[uint32_p | Null] = ..., /) -> CPointer[uint32_p]: ...
    @overload
    def new(self, of: Literal["uint64_t **"], init: uint64_p | Null = ..., /) -> CPointer[uint64_p]: ...
    @overload
    def new(self, of: Literal["uint64_t *[]"], init: int | Sequence[uint64_p | Null] = ..., /) -> CPointer[uint64_p]: ...
    @overload
    def new(self, of: Literal["int32_t **"], init: int32_p | Null = ..., /) -> CPointer[int32_p]: ...
    @overload
    def new(self, of: Literal["int32_t *[]"], init: int | Sequence[int32_p | Null] = ..., /) -> CPointer[int32_p]: ...
    @overload
    def new(self, of: Literal["int64_t **"], init: int64_p | Null = ..., /) -> CPointer[int64_p]: ...
    @overload
    def new(self, of: Literal["int64_t *[]"], init: int | Sequence[int64_p | Null] = ..., /) -> CPointer[int64_p]: ...
    @overload
    def new(self, of: Literal["double **"], init: double_p | Null = ..., /) -> CPointer[double_p]: ...
    @overload
    def new(self, of: Literal["double *[]"], init: int | Sequence[double_p | Null] = ..., /) -> CPointer[double_p]: ...
    @overload
    def new(self, of: Literal["bl_geometry **"], init: bl_geometry | Null = ..., /) -> CPointer[bl_geometry]: ...
    @overload
    def new(self, of: Literal["bl_geometry *[]"], init: int | Sequence[bl_geometry | Null] = ..., /) -> CPointer[bl_geometry]: ...
    @overload
    def new(self, of: Literal["bl_superblock **"], init: bl_superblock | Null = ..., /) -> CPointer[bl_superblock]: ...
    @overload
    def new(self, of: Literal["bl_superblock *[]"], init: int | Sequence[bl_superblock | Null] = ..., /) -> CPointer[bl_superblock]: ...
    @overload
    def new(self, of: Literal["bl_epoch_line **"], init: bl_epoch_line | Null = ..., /) -> CPointer[bl_epoch_line]: ...
    @overload
    def new(self, of: Literal["bl_epoch_line *[]"], init: int | Sequence[bl_epoch_line | Null] = ..., /) -> CPointer[bl_epoch_line]: ...
    @overload
    def new(self, of: Literal["bl_candidate_line **"], init: bl_candidate_line | Null = ..., /) -> CPointer[bl_candidate_line]: ...
    @overload
    def new(self, of: Literal["bl_candidate_line *[]"], init: int | Sequence[bl_candidate_line | Null] = ..., /) -> CPointer[bl_candidate_line]: ...
    @overload
    def new(self, of: Literal["bl_heartbeat_line **"], init: bl_heartbeat_line | Null = ..., /) -> CPointer[bl_heartbeat_line]: ...
    @overload
    def new(self, of: Literal["bl_heartbeat_line *[]"], init: int | Sequence[bl_heartbeat_line | Null] = ..., /) -> CPointer[bl_heartbeat_line]: ...
    @overload
    def new(self, of: Literal["bl_lobby_request **"], init: bl_lobby_request | Null = ..., /) -> CPointer[bl_lobby_request]: ...
    @overload
    def new(self, of: Literal["bl_lobby_request *[]"], init: int | Sequence[bl_lobby_request | Null] = ..., /) -> CPointer[bl_lobby_request]: ...
    @overload
    def new(self, of: Literal["bl_lobby_reply **"], init: bl_lobby_reply | Null = ..., /) -> CPointer[bl_lobby_reply]: ...
    @overload
    def new(self, of: Literal["bl_lobby_reply *[]"], init: int | Sequence[bl_lobby_reply | Null] = ..., /) -> CPointer[bl_lobby_reply]: ...
    @overload
    def new(self, of: Literal["bl_doorbell **"], init: bl_doorbell | Null = ..., /) -> CPointer[bl_doorbell]: ...
    @overload
    def new(self, of: Literal["bl_doorbell *[]"], init: int | Sequence[bl_doorbell | Null] = ..., /) -> CPointer[bl_doorbell]: ...
    @overload
    def new(self, of: Literal["bl_session_line **"], init: bl_session_line | Null = ..., /) -> CPointer[bl_session_line]: ...
    @overload
    def new(self, of: Literal["bl_session_line *[]"], init: int | Sequence[bl_session_line | Null] = ..., /) -> CPointer[bl_session_line]: ...
    @overload
    def new(self, of: Literal["bl_request **"], init: bl_request | Null = ..., /) -> CPointer[bl_request]: ...
    @overload
    def new(self, of: Literal["bl_request *[]"], init: int | Sequence[bl_request | Null] = ..., /) -> CPointer[bl_request]: ...
    @overload
    def new(self, of: Literal["bl_reply **"], init: bl_reply | Null = ..., /) -> CPointer[bl_reply]: ...
    @overload
    def new(self, of: Literal["bl_reply *[]"], init: int | Sequence[bl_reply | Null] = ..., /) -> CPointer[bl_reply]: ...
    @overload
    def new(self, of: Literal["bl_bulk **"], init: bl_bulk | Null = ..., /) -> CPointer[bl_bulk]: ...
    @overload
    def new(self, of: Literal["bl_bulk *[]"], init: int | Sequence[bl_bulk | Null] = ..., /) -> CPointer[bl_bulk]: ...
    @overload
    def new(self, of: Literal["bl_block_request **"], init: bl_block_request | Null = ..., /) -> CPointer[bl_block_request]: ...
    @overload
    def new(self, of: Literal["bl_block_request *[]"], init: int | Sequence[bl_block_request | Null] = ..., /) -> CPointer[bl_block_request]: ...
    @overload
    def new(self, of: Literal["bl_task_request **"], init: bl_task_request | Null = ..., /) -> CPointer[bl_task_request]: ...
    @overload
    def new(self, of: Literal["bl_task_request *[]"], init: int | Sequence[bl_task_request | Null] = ..., /) -> CPointer[bl_task_request]: ...
    @overload
    def new(self, of: Literal["bl_task **"], init: bl_task | Null = ..., /) -> CPointer[bl_task]: ...
    @overload
    def new(self, of: Literal["bl_task *[]"], init: int | Sequence[bl_task | Null] = ..., /) -> CPointer[bl_task]: ...
    @overload
    def new(self, of: Literal["bl_task_counts **"], init: bl_task_counts | Null = ..., /) -> CPointer[bl_task_counts]: ...
    @overload
    def new(self, of: Literal["bl_task_counts *[]"], init: int | Sequence[bl_task_counts | Null] = ..., /) -> CPointer[bl_task_counts]: ...
    @overload
    def new(self, of: Literal["bl_lower_request **"], init: bl_lower_request | Null = ..., /) -> CPointer[bl_lower_request]: ...
    @overload
    def new(self, of: Literal["bl_lower_request *[]"], init: int | Sequence[bl_lower_request | Null] = ..., /) -> CPointer[bl_lower_request]: ...
    @overload
    def new(self, of: Literal["bl_lower_record **"], init: bl_lower_record | Null = ..., /) -> CPointer[bl_lower_record]: ...
    @overload
    def new(self, of: Literal["bl_lower_record *[]"], init: int | Sequence[bl_lower_record | Null] = ..., /) -> CPointer[bl_lower_record]: ...
    @overload
    def new(self, of: Literal["bl_lower_note **"], init: bl_lower_note | Null = ..., /) -> CPointer[bl_lower_note]: ...
    @overload
    def new(self, of: Literal["bl_lower_note *[]"], init: int | Sequence[bl_lower_note | Null] = ..., /) -> CPointer[bl_lower_note]: ...
    @overload
    def new(self, of: Literal["bl_retire_request **"], init: bl_retire_request | Null = ..., /) -> CPointer[bl_retire_request]: ...
    @overload
    def new(self, of: Literal["bl_retire_request *[]"], init: int | Sequence[bl_retire_request | Null] = ..., /) -> CPointer[bl_retire_request]: ...
    @overload
    def new(self, of: Literal["bl_block_reply **"], init: bl_block_reply | Null = ..., /) -> CPointer[bl_block_reply]: ...
    @overload
    def new(self, of: Literal["bl_block_reply *[]"], init: int | Sequence[bl_block_reply | Null] = ..., /) -> CPointer[bl_block_reply]: ...
    @overload
    def new(self, of: Literal["bl_block_record **"], init: bl_block_record | Null = ..., /) -> CPointer[bl_block_record]: ...
    @overload
    def new(self, of: Literal["bl_block_record *[]"], init: int | Sequence[bl_block_record | Null] = ..., /) -> CPointer[bl_block_record]: ...
    @overload
    def new(self, of: Literal["bl_commit **"], init: bl_commit | Null = ..., /) -> CPointer[bl_commit]: ...
    @overload
    def new(self, of: Literal["bl_commit *[]"], init: int | Sequence[bl_commit | Null] = ..., /) -> CPointer[bl_commit]: ...
    @overload
    def new(self, of: Literal["bl_name **"], init: bl_name | Null = ..., /) -> CPointer[bl_name]: ...
    @overload
    def new(self, of: Literal["bl_name *[]"], init: int | Sequence[bl_name | Null] = ..., /) -> CPointer[bl_name]: ...
    @overload
    def new(self, of: Literal["bl_named_commit **"], init: bl_named_commit | Null = ..., /) -> CPointer[bl_named_commit]: ...
    @overload
    def new(self, of: Literal["bl_named_commit *[]"], init: int | Sequence[bl_named_commit | Null] = ..., /) -> CPointer[bl_named_commit]: ...
    @overload
    def new(self, of: Literal["bl_entry **"], init: bl_entry | Null = ..., /) -> CPointer[bl_entry]: ...
    @overload
    def new(self, of: Literal["bl_entry *[]"], init: int | Sequence[bl_entry | Null] = ..., /) -> CPointer[bl_entry]: ...
    @overload
    def new(self, of: Literal["bl_name_line **"], init: bl_name_line | Null = ..., /) -> CPointer[bl_name_line]: ...
    @overload
    def new(self, of: Literal["bl_name_line *[]"], init: int | Sequence[bl_name_line | Null] = ..., /) -> CPointer[bl_name_line]: ...
    @overload
    def new(self, of: Literal["bl_extent_line **"], init: bl_extent_line | Null = ..., /) -> CPointer[bl_extent_line]: ...
    @overload
    def new(self, of: Literal["bl_extent_line *[]"], init: int | Sequence[bl_extent_line | Null] = ..., /) -> CPointer[bl_extent_line]: ...
    @overload
    def new(self, of: Literal["bl_takeover_cause **"], init: bl_takeover_cause | Null = ..., /) -> CPointer[bl_takeover_cause]: ...
    @overload
    def new(self, of: Literal["bl_takeover_cause *[]"], init: int | Sequence[bl_takeover_cause | Null] = ..., /) -> CPointer[bl_takeover_cause]: ...
    @overload
    def new(self, of: Literal["bl_server_stat **"], init: bl_server_stat | Null = ..., /) -> CPointer[bl_server_stat]: ...
    @overload
    def new(self, of: Literal["bl_server_stat *[]"], init: int | Sequence[bl_server_stat | Null] = ..., /) -> CPointer[bl_server_stat]: ...
    @overload
    def new(self, of: Literal["bl_calls **"], init: bl_calls | Null = ..., /) -> CPointer[bl_calls]: ...
    @overload
    def new(self, of: Literal["bl_calls *[]"], init: int | Sequence[bl_calls | Null] = ..., /) -> CPointer[bl_calls]: ...
    @overload
    def new(self, of: Literal["bl_index_stat **"], init: bl_index_stat | Null = ..., /) -> CPointer[bl_index_stat]: ...
    @overload
    def new(self, of: Literal["bl_index_stat *[]"], init: int | Sequence[bl_index_stat | Null] = ..., /) -> CPointer[bl_index_stat]: ...
    @overload
    def new(self, of: Literal["bl_tenant **"], init: bl_tenant | Null = ..., /) -> CPointer[bl_tenant]: ...
    @overload
    def new(self, of: Literal["bl_tenant *[]"], init: int | Sequence[bl_tenant | Null] = ..., /) -> CPointer[bl_tenant]: ...
    @overload
    def new(self, of: Literal["bl_share_view **"], init: bl_share_view | Null = ..., /) -> CPointer[bl_share_view]: ...
    @overload
    def new(self, of: Literal["bl_share_view *[]"], init: int | Sequence[bl_share_view | Null] = ..., /) -> CPointer[bl_share_view]: ...
    @overload
    def new(self, of: Literal["bl_hint_stat **"], init: bl_hint_stat | Null = ..., /) -> CPointer[bl_hint_stat]: ...
    @overload
    def new(self, of: Literal["bl_hint_stat *[]"], init: int | Sequence[bl_hint_stat | Null] = ..., /) -> CPointer[bl_hint_stat]: ...
    @overload
    def new(self, of: Literal["bl_lower_stat **"], init: bl_lower_stat | Null = ..., /) -> CPointer[bl_lower_stat]: ...
    @overload
    def new(self, of: Literal["bl_lower_stat *[]"], init: int | Sequence[bl_lower_stat | Null] = ..., /) -> CPointer[bl_lower_stat]: ...
    @overload
    def new(self, of: Literal["bl_client_figures **"], init: bl_client_figures | Null = ..., /) -> CPointer[bl_client_figures]: ...
    @overload
    def new(self, of: Literal["bl_client_figures *[]"], init: int | Sequence[bl_client_figures | Null] = ..., /) -> CPointer[bl_client_figures]: ...
    @overload
    def new(self, of: Literal["bl_pool **"], init: bl_pool | Null = ..., /) -> CPointer[bl_pool]: ...
    @overload
    def new(self, of: Literal["bl_pool *[]"], init: int | Sequence[bl_pool | Null] = ..., /) -> CPointer[bl_pool]: ...
    @overload
    def new(self, of: Literal["bl_pool_config **"], init: bl_pool_config | Null = ..., /) -> CPointer[bl_pool_config]: ...
    @overload
    def new(self, of: Literal["bl_pool_config *[]"], init: int | Sequence[bl_pool_config | Null] = ..., /) -> CPointer[bl_pool_config]: ...
    @overload
    def new(self, of: Literal["bl_call **"], init: bl_call | Null = ..., /) -> CPointer[bl_call]: ...
    @overload
    def new(self, of: Literal["bl_call *[]"], init: int | Sequence[bl_call | Null] = ..., /) -> CPointer[bl_call]: ...
    @overload
    def new(self, of: Literal["bl_server **"], init: bl_server | Null = ..., /) -> CPointer[bl_server]: ...
    @overload
    def new(self, of: Literal["bl_server *[]"], init: int | Sequence[bl_server | Null] = ..., /) -> CPointer[bl_server]: ...
    @overload
    def new(self, of: Literal["bl_quota **"], init: bl_quota | Null = ..., /) -> CPointer[bl_quota]: ...
    @overload
    def new(self, of: Literal["bl_quota *[]"], init: int | Sequence[bl_quota | Null] = ..., /) -> CPointer[bl_quota]: ...
    @overload
    def new(self, of: Literal["bl_session **"], init: bl_session | Null = ..., /) -> CPointer[bl_session]: ...
    @overload
    def new(self, of: Literal["bl_session *[]"], init: int | Sequence[bl_session | Null] = ..., /) -> CPointer[bl_session]: ...
    @overload
    def new(self, of: Literal["bl_session_stat **"], init: bl_session_stat | Null = ..., /) -> CPointer[bl_session_stat]: ...
    @overload
    def new(self, of: Literal["bl_session_stat *[]"], init: int | Sequence[bl_session_stat | Null] = ..., /) -> CPointer[bl_session_stat]: ...
    @overload
    def new(self, of: Literal["bl_message **"], init: bl_message | Null = ..., /) -> CPointer[bl_message]: ...
    @overload
    def new(self, of: Literal["bl_message *[]"], init: int | Sequence[bl_message | Null] = ..., /) -> CPointer[bl_message]: ...
    @overload
    def new(self, of: Literal["bl_pump **"], init: bl_pump | Null = ..., /) -> CPointer[bl_pump]: ...
    @overload
    def new(self, of: Literal["bl_pump *[]"], init: int | Sequence[bl_pump | Null] = ..., /) -> CPointer[bl_pump]: ...
    @overload
    def new(self, of: Literal["bl_function_call **"], init: bl_function_call | Null = ..., /) -> CPointer[bl_function_call]: ...
    @overload
    def new(self, of: Literal["bl_function_call *[]"], init: int | Sequence[bl_function_call | Null] = ..., /) -> CPointer[bl_function_call]: ...
    @overload
    def new(self, of: Literal["bl_report **"], init: bl_report | Null = ..., /) -> CPointer[bl_report]: ...
    @overload
    def new(self, of: Literal["bl_report *[]"], init: int | Sequence[bl_report | Null] = ..., /) -> CPointer[bl_report]: ...
    @overload
    def new(self, of: Literal["bl_trace_clocks **"], init: bl_trace_clocks | Null = ..., /) -> CPointer[bl_trace_clocks]: ...
    @overload
    def new(self, of: Literal["bl_trace_clocks *[]"], init: int | Sequence[bl_trace_clocks | Null] = ..., /) -> CPointer[bl_trace_clocks]: ...
    @overload
    def new(self, of: Literal["bl_trace_head **"], init: bl_trace_head | Null = ..., /) -> CPointer[bl_trace_head]: ...
    @overload
    def new(self, of: Literal["bl_trace_head *[]"], init: int | Sequence[bl_trace_head | Null] = ..., /) -> CPointer[bl_trace_head]: ...
    @overload
    def new(self, of: Literal["bl_trace_entry **"], init: bl_trace_entry | Null = ..., /) -> CPointer[bl_trace_entry]: ...
    @overload
    def new(self, of: Literal["bl_trace_entry *[]"], init: int | Sequence[bl_trace_entry | Null] = ..., /) -> CPointer[bl_trace_entry]: ...
    @overload
    def new(self, of: Literal["bl_index **"], init: bl_index | Null = ..., /) -> CPointer[bl_index]: ...
    @overload
    def new(self, of: Literal["bl_index *[]"], init: int | Sequence[bl_index | Null] = ..., /) -> CPointer[bl_index]: ...
    @overload
    def new(self, of: Literal["bl_share_rule **"], init: bl_share_rule | Null = ..., /) -> CPointer[bl_share_rule]: ...
    @overload
    def new(self, of: Literal["bl_share_rule *[]"], init: int | Sequence[bl_share_rule | Null] = ..., /) -> CPointer[bl_share_rule]: ...
    @overload
    def new(self, of: Literal["bl_map_cell **"], init: bl_map_cell | Null = ..., /) -> CPointer[bl_map_cell]: ...
    @overload
    def new(self, of: Literal["bl_map_cell *[]"], init: int | Sequence[bl_map_cell | Null] = ..., /) -> CPointer[bl_map_cell]: ...
    @overload
    def new(self, of: Literal["bl_session_view **"], init: bl_session_view | Null = ..., /) -> CPointer[bl_session_view]: ...
    @overload
    def new(self, of: Literal["bl_session_view *[]"], init: int | Sequence[bl_session_view | Null] = ..., /) -> CPointer[bl_session_view]: ...
    @overload
    def new(self, of: Literal["bl_sessions_reply **"], init: bl_sessions_reply | Null = ..., /) -> CPointer[bl_sessions_reply]: ...
    @overload
    def new(self, of: Literal["bl_sessions_reply *[]"], init: int | Sequence[bl_sessions_reply | Null] = ..., /) -> CPointer[bl_sessions_reply]: ...
    @overload
    def new(self, of: Literal["bl_change **"], init: bl_change | Null = ..., /) -> CPointer[bl_change]: ...
    @overload
    def new(self, of: Literal["bl_change *[]"], init: int | Sequence[bl_change | Null] = ..., /) -> CPointer[bl_change]: ...
    @overload
    def new(self, of: Literal["bl_events **"], init: bl_events | Null = ..., /) -> CPointer[bl_events]: ...
    @overload
    def new(self, of: Literal["bl_events *[]"], init: int | Sequence[bl_events | Null] = ..., /) -> CPointer[bl_events]: ...
    @overload
    def new(self, of: Literal["bl_event **"], init: bl_event | Null = ..., /) -> CPointer[bl_event]: ...
    @overload
    def new(self, of: Literal["bl_event *[]"], init: int | Sequence[bl_event | Null] = ..., /) -> CPointer[bl_event]: ...
    @overload
    def new(self, of: Literal["bl_io_queue **"], init: bl_io_queue | Null = ..., /) -> CPointer[bl_io_queue]: ...
    @overload
    def new(self, of: Literal["bl_io_queue *[]"], init: int | Sequence[bl_io_queue | Null] = ..., /) -> CPointer[bl_io_queue]: ...
    @overload
    def new(self, of: Literal["bl_tokens **"], init: bl_tokens | Null = ..., /) -> CPointer[bl_tokens]: ...
    @overload
    def new(self, of: Literal["bl_tokens *[]"], init: int | Sequence[bl_tokens | Null] = ..., /) -> CPointer[bl_tokens]: ...
    @overload
    def new(self, of: Literal["bl_node **"], init: bl_node | Null = ..., /) -> CPointer[bl_node]: ...
    @overload
    def new(self, of: Literal["bl_node *[]"], init: int | Sequence[bl_node | Null] = ..., /) -> CPointer[bl_node]: ...
    @overload
    def new(self, of: Literal["bl_member **"], init: bl_member | Null = ..., /) -> CPointer[bl_member]: ...
    @overload
    def new(self, of: Literal["bl_member *[]"], init: int | Sequence[bl_member | Null] = ..., /) -> CPointer[bl_member]: ...
    @overload
    def new(self, of: Literal["bl_direction **"], init: bl_direction | Null = ..., /) -> CPointer[bl_direction]: ...
    @overload
    def new(self, of: Literal["bl_direction *[]"], init: int | Sequence[bl_direction | Null] = ..., /) -> CPointer[bl_direction]: ...
    @overload
    def new(self, of: Literal["bl_queue **"], init: bl_queue | Null = ..., /) -> CPointer[bl_queue]: ...
    @overload
    def new(self, of: Literal["bl_queue *[]"], init: int | Sequence[bl_queue | Null] = ..., /) -> CPointer[bl_queue]: ...
    @overload
    def new(self, of: Literal["bl_admission **"], init: bl_admission | Null = ..., /) -> CPointer[bl_admission]: ...
    @overload
    def new(self, of: Literal["bl_admission *[]"], init: int | Sequence[bl_admission | Null] = ..., /) -> CPointer[bl_admission]: ...
    @overload
    def new(self, of: Literal["bl_queue_stat **"], init: bl_queue_stat | Null = ..., /) -> CPointer[bl_queue_stat]: ...
    @overload
    def new(self, of: Literal["bl_queue_stat *[]"], init: int | Sequence[bl_queue_stat | Null] = ..., /) -> CPointer[bl_queue_stat]: ...
    @overload
    def new(self, of: Literal["bl_price **"], init: bl_price | Null = ..., /) -> CPointer[bl_price]: ...
    @overload
    def new(self, of: Literal["bl_price *[]"], init: int | Sequence[bl_price | Null] = ..., /) -> CPointer[bl_price]: ...
    @overload
    def new(self, of: Literal["bl_transfer_stats **"], init: bl_transfer_stats | Null = ..., /) -> CPointer[bl_transfer_stats]: ...
    @overload
    def new(self, of: Literal["bl_transfer_stats *[]"], init: int | Sequence[bl_transfer_stats | Null] = ..., /) -> CPointer[bl_transfer_stats]: ...
    @overload
    def new(self, of: Literal["bl_io_request **"], init: bl_io_request | Null = ..., /) -> CPointer[bl_io_request]: ...
    @overload
    def new(self, of: Literal["bl_io_request *[]"], init: int | Sequence[bl_io_request | Null] = ..., /) -> CPointer[bl_io_request]: ...
    @overload
    def new(self, of: Literal["bl_fragment **"], init: bl_fragment | Null = ..., /) -> CPointer[bl_fragment]: ...
    @overload
    def new(self, of: Literal["bl_fragment *[]"], init: int | Sequence[bl_fragment | Null] = ..., /) -> CPointer[bl_fragment]: ...
    @overload
    def new(self, of: Literal["bl_piece **"], init: bl_piece | Null = ..., /) -> CPointer[bl_piece]: ...
    @overload
    def new(self, of: Literal["bl_piece *[]"], init: int | Sequence[bl_piece | Null] = ..., /) -> CPointer[bl_piece]: ...
    @overload
    def new(self, of: Literal["bl_chunk **"], init: bl_chunk | Null = ..., /) -> CPointer[bl_chunk]: ...
    @overload
    def new(self, of: Literal["bl_chunk *[]"], init: int | Sequence[bl_chunk | Null] = ..., /) -> CPointer[bl_chunk]: ...
    @overload
    def new(self, of: Literal["bl_plan **"], init: bl_plan | Null = ..., /) -> CPointer[bl_plan]: ...
    @overload
    def new(self, of: Literal["bl_plan *[]"], init: int | Sequence[bl_plan | Null] = ..., /) -> CPointer[bl_plan]: ...
    @overload
    def new(self, of: Literal["bl_span **"], init: bl_span | Null = ..., /) -> CPointer[bl_span]: ...
    @overload
    def new(self, of: Literal["bl_span *[]"], init: int | Sequence[bl_span | Null] = ..., /) -> CPointer[bl_span]: ...
    @overload
    def new(self, of: Literal["bl_windows **"], init: bl_windows | Null = ..., /) -> CPointer[bl_windows]: ...
    @overload
    def new(self, of: Literal["bl_windows *[]"], init: int | Sequence[bl_windows | Null] = ..., /) -> CPointer[bl_windows]: ...
    @overload
    def new(self, of: Literal["bl_copy_settings **"], init: bl_copy_settings | Null = ..., /) -> CPointer[bl_copy_settings]: ...
    @overload
    def new(self, of: Literal["bl_copy_settings *[]"], init: int | Sequence[bl_copy_settings | Null] = ..., /) -> CPointer[bl_copy_settings]: ...
    @overload
    def new(self, of: Literal["bl_store **"], init: bl_store | Null = ..., /) -> CPointer[bl_store]: ...
    @overload
    def new(self, of: Literal["bl_store *[]"], init: int | Sequence[bl_store | Null] = ..., /) -> CPointer[bl_store]: ...
    @overload
    def new(self, of: Literal["bl_store_record **"], init: bl_store_record | Null = ..., /) -> CPointer[bl_store_record]: ...
    @overload
    def new(self, of: Literal["bl_store_record *[]"], init: int | Sequence[bl_store_record | Null] = ..., /) -> CPointer[bl_store_record]: ...
    @overload
    def new(self, of: Literal["bl_store_place **"], init: bl_store_place | Null = ..., /) -> CPointer[bl_store_place]: ...
    @overload
    def new(self, of: Literal["bl_store_place *[]"], init: int | Sequence[bl_store_place | Null] = ..., /) -> CPointer[bl_store_place]: ...
    @overload
    def new(self, of: Literal["bl_store_stat **"], init: bl_store_stat | Null = ..., /) -> CPointer[bl_store_stat]: ...
    @overload
    def new(self, of: Literal["bl_store_stat *[]"], init: int | Sequence[bl_store_stat | Null] = ..., /) -> CPointer[bl_store_stat]: ...
    @overload
    def new(self, of: Literal["bl_disk **"], init: bl_disk | Null = ..., /) -> CPointer[bl_disk]: ...
    @overload
    def new(self, of: Literal["bl_disk *[]"], init: int | Sequence[bl_disk | Null] = ..., /) -> CPointer[bl_disk]: ...
    @overload
    def new(self, of: Literal["bl_disk_request **"], init: bl_disk_request | Null = ..., /) -> CPointer[bl_disk_request]: ...
    @overload
    def new(self, of: Literal["bl_disk_request *[]"], init: int | Sequence[bl_disk_request | Null] = ..., /) -> CPointer[bl_disk_request]: ...
    @overload
    def new(self, of: Literal["bl_kv_batch **"], init: bl_kv_batch | Null = ..., /) -> CPointer[bl_kv_batch]: ...
    @overload
    def new(self, of: Literal["bl_kv_batch *[]"], init: int | Sequence[bl_kv_batch | Null] = ..., /) -> CPointer[bl_kv_batch]: ...
    @overload
    def new(self, of: Literal["bl_kv_pending **"], init: bl_kv_pending | Null = ..., /) -> CPointer[bl_kv_pending]: ...
    @overload
    def new(self, of: Literal["bl_kv_pending *[]"], init: int | Sequence[bl_kv_pending | Null] = ..., /) -> CPointer[bl_kv_pending]: ...
    @overload
    def new(self, of: Literal["bl_finding **"], init: bl_finding | Null = ..., /) -> CPointer[bl_finding]: ...
    @overload
    def new(self, of: Literal["bl_finding *[]"], init: int | Sequence[bl_finding | Null] = ..., /) -> CPointer[bl_finding]: ...
    @overload
    def new(self, of: Literal["bl_check_report **"], init: bl_check_report | Null = ..., /) -> CPointer[bl_check_report]: ...
    @overload
    def new(self, of: Literal["bl_check_report *[]"], init: int | Sequence[bl_check_report | Null] = ..., /) -> CPointer[bl_check_report]: ...
    @overload
    def new(self, of: Literal["bl_acceptance_config **"], init: bl_acceptance_config | Null = ..., /) -> CPointer[bl_acceptance_config]: ...
    @overload
    def new(self, of: Literal["bl_acceptance_config *[]"], init: int | Sequence[bl_acceptance_config | Null] = ..., /) -> CPointer[bl_acceptance_config]: ...
    @overload
    def new(self, of: Literal["bl_acceptance_cell **"], init: bl_acceptance_cell | Null = ..., /) -> CPointer[bl_acceptance_cell]: ...
    @overload
    def new(self, of: Literal["bl_acceptance_cell *[]"], init: int | Sequence[bl_acceptance_cell | Null] = ..., /) -> CPointer[bl_acceptance_cell]: ...
    @overload
    def new(self, of: Literal["bl_acceptance **"], init: bl_acceptance | Null = ..., /) -> CPointer[bl_acceptance]: ...
    @overload
    def new(self, of: Literal["bl_acceptance *[]"], init: int | Sequence[bl_acceptance | Null] = ..., /) -> CPointer[bl_acceptance]: ...
    @overload
    def new(self, of: Literal["bl_prefix **"], init: bl_prefix | Null = ..., /) -> CPointer[bl_prefix]: ...
    @overload
    def new(self, of: Literal["bl_prefix *[]"], init: int | Sequence[bl_prefix | Null] = ..., /) -> CPointer[bl_prefix]: ...
    @overload
    def new(self, of: Literal["bl_prefix_outcome **"], init: bl_prefix_outcome | Null = ..., /) -> CPointer[bl_prefix_outcome]: ...
    @overload
    def new(self, of: Literal["bl_prefix_outcome *[]"], init: int | Sequence[bl_prefix_outcome | Null] = ..., /) -> CPointer[bl_prefix_outcome]: ...
    @overload
    def new(self, of: Literal["bl_prefix_match **"], init: bl_prefix_match | Null = ..., /) -> CPointer[bl_prefix_match]: ...
    @overload
    def new(self, of: Literal["bl_prefix_match *[]"], init: int | Sequence[bl_prefix_match | Null] = ..., /) -> CPointer[bl_prefix_match]: ...
    @overload
    def new(self, of: Literal["bl_prefix_row **"], init: bl_prefix_row | Null = ..., /) -> CPointer[bl_prefix_row]: ...
    @overload
    def new(self, of: Literal["bl_prefix_row *[]"], init: int | Sequence[bl_prefix_row | Null] = ..., /) -> CPointer[bl_prefix_row]: ...
    @overload
    def new(self, of: Literal["bl_prefix_stat **"], init: bl_prefix_stat | Null = ..., /) -> CPointer[bl_prefix_stat]: ...
    @overload
    def new(self, of: Literal["bl_prefix_stat *[]"], init: int | Sequence[bl_prefix_stat | Null] = ..., /) -> CPointer[bl_prefix_stat]: ...
    @overload
    def new(self, of: Literal["bl_sent **"], init: bl_sent | Null = ..., /) -> CPointer[bl_sent]: ...
    @overload
    def new(self, of: Literal["bl_sent *[]"], init: int | Sequence[bl_sent | Null] = ..., /) -> CPointer[bl_sent]: ...
    @overload
    def new(self, of: Literal["bl_active **"], init: bl_active | Null = ..., /) -> CPointer[bl_active]: ...
    @overload
    def new(self, of: Literal["bl_active *[]"], init: int | Sequence[bl_active | Null] = ..., /) -> CPointer[bl_active]: ...
    @overload
    def new(self, of: Literal["bl_load **"], init: bl_load | Null = ..., /) -> CPointer[bl_load]: ...
    @overload
    def new(self, of: Literal["bl_load *[]"], init: int | Sequence[bl_load | Null] = ..., /) -> CPointer[bl_load]: ...
    @overload
    def new(self, of: Literal["bl_candidate **"], init: bl_candidate | Null = ..., /) -> CPointer[bl_candidate]: ...
    @overload
    def new(self, of: Literal["bl_candidate *[]"], init: int | Sequence[bl_candidate | Null] = ..., /) -> CPointer[bl_candidate]: ...
    @overload
    def new(self, of: Literal["bl_prefills **"], init: bl_prefills | Null = ..., /) -> CPointer[bl_prefills]: ...
    @overload
    def new(self, of: Literal["bl_prefills *[]"], init: int | Sequence[bl_prefills | Null] = ..., /) -> CPointer[bl_prefills]: ...
    @overload
    def new(self, of: Literal["bl_load_share **"], init: bl_load_share | Null = ..., /) -> CPointer[bl_load_share]: ...
    @overload
    def new(self, of: Literal["bl_load_share *[]"], init: int | Sequence[bl_load_share | Null] = ..., /) -> CPointer[bl_load_share]: ...
    @overload
    def new(self, of: Literal["bl_load_table **"], init: bl_load_table | Null = ..., /) -> CPointer[bl_load_table]: ...
    @overload
    def new(self, of: Literal["bl_load_table *[]"], init: int | Sequence[bl_load_table | Null] = ..., /) -> CPointer[bl_load_table]: ...
    @overload
    def new(self, of: Literal["bl_costs **"], init: bl_costs | Null = ..., /) -> CPointer[bl_costs]: ...
    @overload
    def new(self, of: Literal["bl_costs *[]"], init: int | Sequence[bl_costs | Null] = ..., /) -> CPointer[bl_costs]: ...
    @overload
    def new(self, of: Literal["bl_estimate **"], init: bl_estimate | Null = ..., /) -> CPointer[bl_estimate]: ...
    @overload
    def new(self, of: Literal["bl_estimate *[]"], init: int | Sequence[bl_estimate | Null] = ..., /) -> CPointer[bl_estimate]: ...
    @overload
    def new(self, of: Literal["bl_pressure **"], init: bl_pressure | Null = ..., /) -> CPointer[bl_pressure]: ...
    @overload
    def new(self, of: Literal["bl_pressure *[]"], init: int | Sequence[bl_pressure | Null] = ..., /) -> CPointer[bl_pressure]: ...
    @overload
    def new(self, of: Literal["bl_hash **"], init: bl_hash | Null = ..., /) -> CPointer[bl_hash]: ...
    @overload
    def new(self, of: Literal["bl_hash *[]"], init: int | Sequence[bl_hash | Null] = ..., /) -> CPointer[bl_hash]: ...
    @overload
    def new(self, of: Literal["bl_tier **"], init: bl_tier | Null = ..., /) -> CPointer[bl_tier]: ...
    @overload
    def new(self, of: Literal["bl_tier *[]"], init: int | Sequence[bl_tier | Null] = ..., /) -> CPointer[bl_tier]: ...
    @overload
    def new(self, of: Literal["bl_tier_stat **"], init: bl_tier_stat | Null = ..., /) -> CPointer[bl_tier_stat]: ...
    @overload
    def new(self, of: Literal["bl_tier_stat *[]"], init: int | Sequence[bl_tier_stat | Null] = ..., /) -> CPointer[bl_tier_stat]: ...
    @overload
    def new(self, of: Literal["bl_dsa_descriptor **"], init: bl_dsa_descriptor | Null = ..., /) -> CPointer[bl_dsa_descriptor]: ...
    @overload
    def new(self, of: Literal["bl_dsa_descriptor *[]"], init: int | Sequence[bl_dsa_descriptor | Null] = ..., /) -> CPointer[bl_dsa_descriptor]: ...
    @overload
    def new(self, of: Literal["bl_dsa_record **"], init: bl_dsa_record | Null = ..., /) -> CPointer[bl_dsa_record]: ...
    @overload
    def new(self, of: Literal["bl_dsa_record *[]"], init: int | Sequence[bl_dsa_record | Null] = ..., /) -> CPointer[bl_dsa_record]: ...
    @overload
    def new(self, of: Literal["bl_dsa_queue **"], init: bl_dsa_queue | Null = ..., /) -> CPointer[bl_dsa_queue]: ...
    @overload
    def new(self, of: Literal["bl_dsa_queue *[]"], init: int | Sequence[bl_dsa_queue | Null] = ..., /) -> CPointer[bl_dsa_queue]: ...
    @overload
    def new(self, of: Literal["bl_dsa_limits **"], init: bl_dsa_limits | Null = ..., /) -> CPointer[bl_dsa_limits]: ...
    @overload
    def new(self, of: Literal["bl_dsa_limits *[]"], init: int | Sequence[bl_dsa_limits | Null] = ..., /) -> CPointer[bl_dsa_limits]: ...
    @overload
    def new(self, of: Literal["bl_dsa_engine **"], init: bl_dsa_engine | Null = ..., /) -> CPointer[bl_dsa_engine]: ...
    @overload
    def new(self, of: Literal["bl_dsa_engine *[]"], init: int | Sequence[bl_dsa_engine | Null] = ..., /) -> CPointer[bl_dsa_engine]: ...
    @overload
    def new(self, of: Literal["bl_dsa_transfer **"], init: bl_dsa_transfer | Null = ..., /) -> CPointer[bl_dsa_transfer]: ...
    @overload
    def new(self, of: Literal["bl_dsa_transfer *[]"], init: int | Sequence[bl_dsa_transfer | Null] = ..., /) -> CPointer[bl_dsa_transfer]: ...
    @overload
    def new(self, of: Literal["bl_dsa_rules **"], init: bl_dsa_rules | Null = ..., /) -> CPointer[bl_dsa_rules]: ...
    @overload
    def new(self, of: Literal["bl_dsa_rules *[]"], init: int | Sequence[bl_dsa_rules | Null] = ..., /) -> CPointer[bl_dsa_rules]: ...
    @overload
    def new(self, of: Literal["bl_dsa_stat **"], init: bl_dsa_stat | Null = ..., /) -> CPointer[bl_dsa_stat]: ...
    @overload
    def new(self, of: Literal["bl_dsa_stat *[]"], init: int | Sequence[bl_dsa_stat | Null] = ..., /) -> CPointer[bl_dsa_stat]: ...
    @overload
    def new(self, of: Literal["void **"], init: CData = ..., /) -> CPointer[void_p]: ...
    @overload
    def new(self, of: Literal["void *[]"], init: int | Sequence[CData] = ..., /) -> CPointer[void_p]: ...
    @overload
    def cast(self, to: Literal["char *", "volatile char *"], what: CData | int, /) -> char_p: ...
    @overload
    def cast(self, to: Literal["uint8_t *", "volatile uint8_t *"], what: CData | int, /) -> uint8_p: ...
    @overload
    def cast(self, to: Literal["uint16_t *", "volatile uint16_t *"], what: CData | int, /) -> uint16_p: ...
    @overload
    def cast(self, to: Literal["uint32_t *", "volatile uint32_t *"], what: CData | int, /) -> uint32_p: ...
    @overload
    def cast(self, to: Literal["uint64_t *", "volatile uint64_t *"], what: CData | int, /) -> uint64_p: ...
    @overload
    def cast(self, to: Literal["int32_t *", "volatile int32_t *"], what: CData | int, /) -> int32_p: ...
    @overload
    def cast(self, to: Literal["int64_t *", "volatile int64_t *"], what: CData | int, /) -> int64_p: ...
    @overload
    def cast(self, to: Literal["double *", "volatile double *"], what: CData | int, /) -> double_p: ...
    @overload
    def cast(self, to: Literal["bl_geometry *", "volatile bl_geometry *"], what: CData | int, /) -> bl_geometry: ...
    @overload
    def cast(self, to: Literal["bl_superblock *", "volatile bl_superblock *"], what: CData | int, /) -> bl_superblock: ...
    @overload
    def cast(self, to: Literal["bl_epoch_line *", "volatile bl_epoch_line *"], what: CData | int, /) -> bl_epoch_line: ...
    @overload
    def cast(self, to: Literal["bl_candidate_line *", "volatile bl_candidate_line *"], what: CData | int, /) -> bl_candidate_line: ...
    @overload
    def cast(self, to: Literal["bl_heartbeat_line *", "volatile bl_heartbeat_line *"], what: CData | int, /) -> bl_heartbeat_line: ...
    @overload
    def cast(self, to: Literal["bl_lobby_request *", "volatile bl_lobby_request *"], what: CData | int, /) -> bl_lobby_request: ...
    @overload
    def cast(self, to: Literal["bl_lobby_reply *", "volatile bl_lobby_reply *"], what: CData | int, /) -> bl_lobby_reply: ...
    @overload
    def cast(self, to: Literal["bl_doorbell *", "volatile bl_doorbell *"], what: CData | int, /) -> bl_doorbell: ...
    @overload
    def cast(self, to: Literal["bl_session_line *", "volatile bl_session_line *"], what: CData | int, /) -> bl_session_line: ...
    @overload
    def cast(self, to: Literal["bl_request *", "volatile bl_request *"], what: CData | int, /) -> bl_request: ...
    @overload
    def cast(self, to: Literal["bl_reply *", "volatile bl_reply *"], what: CData | int, /) -> bl_reply: ...
    @overload
    def cast(self, to: Literal["bl_bulk *", "volatile bl_bulk *"], what: CData | int, /) -> bl_bulk: ...
    @overload
    def cast(self, to: Literal["bl_block_request *", "volatile bl_block_request *"], what: CData | int, /) -> bl_block_request: ...
    @overload
    def cast(self, to: Literal["bl_task_request *", "volatile bl_task_request *"], what: CData | int, /) -> bl_task_request: ...
    @overload
    def cast(self, to: Literal["bl_task *", "volatile bl_task *"], what: CData | int, /) -> bl_task: ...
    @overload
    def cast(self, to: Literal["bl_task_counts *", "volatile bl_task_counts *"], what: CData | int, /) -> bl_task_counts: ...
    @overload
    def cast(self, to: Literal["bl_lower_request *", "volatile bl_lower_request *"], what: CData | int, /) -> bl_lower_request: ...
    @overload
    def cast(self, to: Literal["bl_lower_record *", "volatile bl_lower_record *"], what: CData | int, /) -> bl_lower_record: ...
    @overload
    def cast(self, to: Literal["bl_lower_note *", "volatile bl_lower_note *"], what: CData | int, /) -> bl_lower_note: ...
    @overload
    def cast(self, to: Literal["bl_retire_request *", "volatile bl_retire_request *"], what: CData | int, /) -> bl_retire_request: ...
    @overload
    def cast(self, to: Literal["bl_block_reply *", "volatile bl_block_reply *"], what: CData | int, /) -> bl_block_reply: ...
    @overload
    def cast(self, to: Literal["bl_block_record *", "volatile bl_block_record *"], what: CData | int, /) -> bl_block_record: ...
    @overload
    def cast(self, to: Literal["bl_commit *", "volatile bl_commit *"], what: CData | int, /) -> bl_commit: ...
    @overload
    def cast(self, to: Literal["bl_name *", "volatile bl_name *"], what: CData | int, /) -> bl_name: ...
    @overload
    def cast(self, to: Literal["bl_named_commit *", "volatile bl_named_commit *"], what: CData | int, /) -> bl_named_commit: ...
    @overload
    def cast(self, to: Literal["bl_entry *", "volatile bl_entry *"], what: CData | int, /) -> bl_entry: ...
    @overload
    def cast(self, to: Literal["bl_name_line *", "volatile bl_name_line *"], what: CData | int, /) -> bl_name_line: ...
    @overload
    def cast(self, to: Literal["bl_extent_line *", "volatile bl_extent_line *"], what: CData | int, /) -> bl_extent_line: ...
    @overload
    def cast(self, to: Literal["bl_takeover_cause *", "volatile bl_takeover_cause *"], what: CData | int, /) -> bl_takeover_cause: ...
    @overload
    def cast(self, to: Literal["bl_server_stat *", "volatile bl_server_stat *"], what: CData | int, /) -> bl_server_stat: ...
    @overload
    def cast(self, to: Literal["bl_calls *", "volatile bl_calls *"], what: CData | int, /) -> bl_calls: ...
    @overload
    def cast(self, to: Literal["bl_index_stat *", "volatile bl_index_stat *"], what: CData | int, /) -> bl_index_stat: ...
    @overload
    def cast(self, to: Literal["bl_tenant *", "volatile bl_tenant *"], what: CData | int, /) -> bl_tenant: ...
    @overload
    def cast(self, to: Literal["bl_share_view *", "volatile bl_share_view *"], what: CData | int, /) -> bl_share_view: ...
    @overload
    def cast(self, to: Literal["bl_hint_stat *", "volatile bl_hint_stat *"], what: CData | int, /) -> bl_hint_stat: ...
    @overload
    def cast(self, to: Literal["bl_lower_stat *", "volatile bl_lower_stat *"], what: CData | int, /) -> bl_lower_stat: ...
    @overload
    def cast(self, to: Literal["bl_client_figures *", "volatile bl_client_figures *"], what: CData | int, /) -> bl_client_figures: ...
    @overload
    def cast(self, to: Literal["bl_pool *", "volatile bl_pool *"], what: CData | int, /) -> bl_pool: ...
    @overload
    def cast(self, to: Literal["bl_pool_config *", "volatile bl_pool_config *"], what: CData | int, /) -> bl_pool_config: ...
    @overload
    def cast(self, to: Literal["bl_call *", "volatile bl_call *"], what: CData | int, /) -> bl_call: ...
    @overload
    def cast(self, to: Literal["bl_server *", "volatile bl_server *"], what: CData | int, /) -> bl_server: ...
    @overload
    def cast(self, to: Literal["bl_quota *", "volatile bl_quota *"], what: CData | int, /) -> bl_quota: ...
    @overload
    def cast(self, to: Literal["bl_session *", "volatile bl_session *"], what: CData | int, /) -> bl_session: ...
    @overload
    def cast(self, to: Literal["bl_session_stat *", "volatile bl_session_stat *"], what: CData | int, /) -> bl_session_stat: ...
    @overload
    def cast(self, to: Literal["bl_message *", "volatile bl_message *"], what: CData | int, /) -> bl_message: ...
    @overload
    def cast(self, to: Literal["bl_pump *", "volatile bl_pump *"], what: CData | int, /) -> bl_pump: ...
    @overload
    def cast(self, to: Literal["bl_function_call *", "volatile bl_function_call *"], what: CData | int, /) -> bl_function_call: ...
    @overload
    def cast(self, to: Literal["bl_report *", "volatile bl_report *"], what: CData | int, /) -> bl_report: ...
    @overload
    def cast(self, to: Literal["bl_trace_clocks *", "volatile bl_trace_clocks *"], what: CData | int, /) -> bl_trace_clocks: ...
    @overload
    def cast(self, to: Literal["bl_trace_head *", "volatile bl_trace_head *"], what: CData | int, /) -> bl_trace_head: ...
    @overload
    def cast(self, to: Literal["bl_trace_entry *", "volatile bl_trace_entry *"], what: CData | int, /) -> bl_trace_entry: ...
    @overload
    def cast(self, to: Literal["bl_index *", "volatile bl_index *"], what: CData | int, /) -> bl_index: ...
    @overload
    def cast(self, to: Literal["bl_share_rule *", "volatile bl_share_rule *"], what: CData | int, /) -> bl_share_rule: ...
    @overload
    def cast(self, to: Literal["bl_map_cell *", "volatile bl_map_cell *"], what: CData | int, /) -> bl_map_cell: ...
    @overload
    def cast(self, to: Literal["bl_session_view *", "volatile bl_session_view *"], what: CData | int, /) -> bl_session_view: ...
    @overload
    def cast(self, to: Literal["bl_sessions_reply *", "volatile bl_sessions_reply *"], what: CData | int, /) -> bl_sessions_reply: ...
    @overload
    def cast(self, to: Literal["bl_change *", "volatile bl_change *"], what: CData | int, /) -> bl_change: ...
    @overload
    def cast(self, to: Literal["bl_events *", "volatile bl_events *"], what: CData | int, /) -> bl_events: ...
    @overload
    def cast(self, to: Literal["bl_event *", "volatile bl_event *"], what: CData | int, /) -> bl_event: ...
    @overload
    def cast(self, to: Literal["bl_io_queue *", "volatile bl_io_queue *"], what: CData | int, /) -> bl_io_queue: ...
    @overload
    def cast(self, to: Literal["bl_tokens *", "volatile bl_tokens *"], what: CData | int, /) -> bl_tokens: ...
    @overload
    def cast(self, to: Literal["bl_node *", "volatile bl_node *"], what: CData | int, /) -> bl_node: ...
    @overload
    def cast(self, to: Literal["bl_member *", "volatile bl_member *"], what: CData | int, /) -> bl_member: ...
    @overload
    def cast(self, to: Literal["bl_direction *", "volatile bl_direction *"], what: CData | int, /) -> bl_direction: ...
    @overload
    def cast(self, to: Literal["bl_queue *", "volatile bl_queue *"], what: CData | int, /) -> bl_queue: ...
    @overload
    def cast(self, to: Literal["bl_admission *", "volatile bl_admission *"], what: CData | int, /) -> bl_admission: ...
    @overload
    def cast(self, to: Literal["bl_queue_stat *", "volatile bl_queue_stat *"], what: CData | int, /) -> bl_queue_stat: ...
    @overload
    def cast(self, to: Literal["bl_price *", "volatile bl_price *"], what: CData | int, /) -> bl_price: ...
    @overload
    def cast(self, to: Literal["bl_transfer_stats *", "volatile bl_transfer_stats *"], what: CData | int, /) -> bl_transfer_stats: ...
    @overload
    def cast(self, to: Literal["bl_io_request *", "volatile bl_io_request *"], what: CData | int, /) -> bl_io_request: ...
    @overload
    def cast(self, to: Literal["bl_fragment *", "volatile bl_fragment *"], what: CData | int, /) -> bl_fragment: ...
    @overload
    def cast(self, to: Literal["bl_piece *", "volatile bl_piece *"], what: CData | int, /) -> bl_piece: ...
    @overload
    def cast(self, to: Literal["bl_chunk *", "volatile bl_chunk *"], what: CData | int, /) -> bl_chunk: ...
    @overload
    def cast(self, to: Literal["bl_plan *", "volatile bl_plan *"], what: CData | int, /) -> bl_plan: ...
    @overload
    def cast(self, to: Literal["bl_span *", "volatile bl_span *"], what: CData | int, /) -> bl_span: ...
    @overload
    def cast(self, to: Literal["bl_windows *", "volatile bl_windows *"], what: CData | int, /) -> bl_windows: ...
    @overload
    def cast(self, to: Literal["bl_copy_settings *", "volatile bl_copy_settings *"], what: CData | int, /) -> bl_copy_settings: ...
    @overload
    def cast(self, to: Literal["bl_store *", "volatile bl_store *"], what: CData | int, /) -> bl_store: ...
    @overload
    def cast(self, to: Literal["bl_store_record *", "volatile bl_store_record *"], what: CData | int, /) -> bl_store_record: ...
    @overload
    def cast(self, to: Literal["bl_store_place *", "volatile bl_store_place *"], what: CData | int, /) -> bl_store_place: ...
    @overload
    def cast(self, to: Literal["bl_store_stat *", "volatile bl_store_stat *"], what: CData | int, /) -> bl_store_stat: ...
    @overload
    def cast(self, to: Literal["bl_disk *", "volatile bl_disk *"], what: CData | int, /) -> bl_disk: ...
    @overload
    def cast(self, to: Literal["bl_disk_request *", "volatile bl_disk_request *"], what: CData | int, /) -> bl_disk_request: ...
    @overload
    def cast(self, to: Literal["bl_kv_batch *", "volatile bl_kv_batch *"], what: CData | int, /) -> bl_kv_batch: ...
    @overload
    def cast(self, to: Literal["bl_kv_pending *", "volatile bl_kv_pending *"], what: CData | int, /) -> bl_kv_pending: ...
    @overload
    def cast(self, to: Literal["bl_finding *", "volatile bl_finding *"], what: CData | int, /) -> bl_finding: ...
    @overload
    def cast(self, to: Literal["bl_check_report *", "volatile bl_check_report *"], what: CData | int, /) -> bl_check_report: ...
    @overload
    def cast(self, to: Literal["bl_acceptance_config *", "volatile bl_acceptance_config *"], what: CData | int, /) -> bl_acceptance_config: ...
    @overload
    def cast(self, to: Literal["bl_acceptance_cell *", "volatile bl_acceptance_cell *"], what: CData | int, /) -> bl_acceptance_cell: ...
    @overload
    def cast(self, to: Literal["bl_acceptance *", "volatile bl_acceptance *"], what: CData | int, /) -> bl_acceptance: ...
    @overload
    def cast(self, to: Literal["bl_prefix *", "volatile bl_prefix *"], what: CData | int, /) -> bl_prefix: ...
    @overload
    def cast(self, to: Literal["bl_prefix_outcome *", "volatile bl_prefix_outcome *"], what: CData | int, /) -> bl_prefix_outcome: ...
    @overload
    def cast(self, to: Literal["bl_prefix_match *", "volatile bl_prefix_match *"], what: CData | int, /) -> bl_prefix_match: ...
    @overload
    def cast(self, to: Literal["bl_prefix_row *", "volatile bl_prefix_row *"], what: CData | int, /) -> bl_prefix_row: ...
    @overload
    def cast(self, to: Literal["bl_prefix_stat *", "volatile bl_prefix_stat *"], what: CData | int, /) -> bl_prefix_stat: ...
    @overload
    def cast(self, to: Literal["bl_sent *", "volatile bl_sent *"], what: CData | int, /) -> bl_sent: ...
    @overload
    def cast(self, to: Literal["bl_active *", "volatile bl_active *"], what: CData | int, /) -> bl_active: ...
    @overload
    def cast(self, to: Literal["bl_load *", "volatile bl_load *"], what: CData | int, /) -> bl_load: ...
    @overload
    def cast(self, to: Literal["bl_candidate *", "volatile bl_candidate *"], what: CData | int, /) -> bl_candidate: ...
    @overload
    def cast(self, to: Literal["bl_prefills *", "volatile bl_prefills *"], what: CData | int, /) -> bl_prefills: ...
    @overload
    def cast(self, to: Literal["bl_load_share *", "volatile bl_load_share *"], what: CData | int, /) -> bl_load_share: ...
    @overload
    def cast(self, to: Literal["bl_load_table *", "volatile bl_load_table *"], what: CData | int, /) -> bl_load_table: ...
    @overload
    def cast(self, to: Literal["bl_costs *", "volatile bl_costs *"], what: CData | int, /) -> bl_costs: ...
    @overload
    def cast(self, to: Literal["bl_estimate *", "volatile bl_estimate *"], what: CData | int, /) -> bl_estimate: ...
    @overload
    def cast(self, to: Literal["bl_pressure *", "volatile bl_pressure *"], what: CData | int, /) -> bl_pressure: ...
    @overload
    def cast(self, to: Literal["bl_hash *", "volatile bl_hash *"], what: CData | int, /) -> bl_hash: ...
    @overload
    def cast(self, to: Literal["bl_tier *", "volatile bl_tier *"], what: CData | int, /) -> bl_tier: ...
    @overload
    def cast(self, to: Literal["bl_tier_stat *", "volatile bl_tier_stat *"], what: CData | int, /) -> bl_tier_stat: ...
    @overload
    def cast(self, to: Literal["bl_dsa_descriptor *", "volatile bl_dsa_descriptor *"], what: CData | int, /) -> bl_dsa_descriptor: ...
    @overload
    def cast(self, to: Literal["bl_dsa_record *", "volatile bl_dsa_record *"], what: CData | int, /) -> bl_dsa_record: ...
    @overload
    def cast(self, to: Literal["bl_dsa_queue *", "volatile bl_dsa_queue *"], what: CData | int, /) -> bl_dsa_queue: ...
    @overload
    def cast(self, to: Literal["bl_dsa_limits *", "volatile bl_dsa_limits *"], what: CData | int, /) -> bl_dsa_limits: ...
    @overload
    def cast(self, to: Literal["bl_dsa_engine *", "volatile bl_dsa_engine *"], what: CData | int, /) -> bl_dsa_engine: ...
    @overload
    def cast(self, to: Literal["bl_dsa_transfer *", "volatile bl_dsa_transfer *"], what: CData | int, /) -> bl_dsa_transfer: ...
    @overload
    def cast(self, to: Literal["bl_dsa_rules *", "volatile bl_dsa_rules *"], what: CData | int, /) -> bl_dsa_rules: ...
    @overload
    def cast(self, to: Literal["bl_dsa_stat *", "volatile bl_dsa_stat *"], what: CData | int, /) -> bl_dsa_stat: ...
    @overload
    def cast(self, to: Literal["void *", "volatile void *"], what: CData | int, /) -> void_p: ...
    @overload
    def cast(self, to: Literal["bl_handler"], what: CData | int, /) -> bl_handler: ...
    @overload
    def cast(self, to: Literal["char"], what: CData | int, /) -> CNumber: ...
    @overload
    def cast(self, to: Literal["uint8_t"], what: CData | int, /) -> CNumber: ...
    @overload
    def cast(self, to: Literal["uint16_t"], what: CData | int, /) -> CNumber: ...
    @overload
    def cast(self, to: Literal["uint32_t"], what: CData | int, /) -> CNumber: ...
    @overload
    def cast(self, to: Literal["uint64_t"], what: CData | int, /) -> CNumber: ...
    @overload
    def cast(self, to: Literal["int32_t"], what: CData | int, /) -> CNumber: ...
    @overload
    def cast(self, to: Literal["int64_t"], what: CData | int, /) -> CNumber: ...
    @overload
    def cast(self, to: Literal["size_t"], what: CData | int, /) -> CNumber: ...
    @overload
    def cast(self, to: Literal["uintptr_t"], what: CData | int, /) -> CNumber: ...

class Lib:
    BL_FORMAT_VERSION: Final[int]
    BL_LINE_SIZE: Final[int]
    BL_POLL_STRIDE: Final[int]
    BL_PAGE_SIZE: Final[int]
    BL_STRIPE_SIZE: Final[int]
    BL_STRIPE_SHIFT: Final[int]
    BL_DEVICE_COUNT_MAX: Final[int]
    BL_HOST_COUNT: Final[int]
    BL_HALF_COUNT: Final[int]
    BL_MESSAGE_INLINE_SIZE: Final[int]
    BL_EXTENT_STRIPES_MAX: Final[int]
    BL_CHUNK_SIZE: Final[int]
    BL_SERVER_STRIDE: Final[int]
    BL_CANDIDATE_OFFSET: Final[int]
    BL_LOBBY_OFFSET: Final[int]
    BL_LOBBY_STRIDE: Final[int]
    BL_LOBBY_END: Final[int]
    BL_COHERENCE_HARDWARE: Final[int]
    BL_COHERENCE_SOFTWARE: Final[int]
    BL_SERVER_TAKING: Final[int]
    BL_SERVER_SERVING: Final[int]
    BL_SERVER_STOPPED: Final[int]
    BL_SERVER_FAILED: Final[int]
    BL_LOBBY_ATTACH: Final[int]
    BL_LOBBY_DETACH: Final[int]
    BL_SESSION_FREE: Final[int]
    BL_SESSION_LIVE: Final[int]
    BL_SESSION_SUSPECT: Final[int]
    BL_MESSAGE_BULK: Final[int]
    BL_METHOD_PING: Final[int]
    BL_METHOD_LOOKUP: Final[int]
    BL_METHOD_RESERVE: Final[int]
    BL_METHOD_COMMIT: Final[int]
    BL_METHOD_ABORT: Final[int]
    BL_METHOD_RELEASE: Final[int]
    BL_METHOD_REMOVE: Final[int]
    BL_METHOD_STAT: Final[int]
    BL_METHOD_RETIRE: Final[int]
    BL_METHOD_TASK_CLAIM: Final[int]
    BL_METHOD_TASK_EXTEND: Final[int]
    BL_METHOD_TASK_COUNT: Final[int]
    BL_METHOD_ONBOARD: Final[int]
    BL_METHOD_TIERS: Final[int]
    BL_METHOD_LOWER_TAKE: Final[int]
    BL_METHOD_LOWER_TELL: Final[int]
    BL_METHOD_REPORT: Final[int]
    BL_METHOD_USER: Final[int]
    BL_LOOKUP_PIN: Final[int]
    BL_RESERVE_KEPT: Final[int]
    BL_RESERVE_BROUGHT: Final[int]
    BL_COMMIT_NAMED: Final[int]
    BL_ONBOARD_MORE: Final[int]
    BL_REMOVE_UNCLAIMED: Final[int]
    BL_BLOCK_MISS: Final[int]
    BL_BLOCK_HIT: Final[int]
    BL_BLOCK_PENDING: Final[int]
    BL_BLOCK_GRANTED: Final[int]
    BL_BLOCK_REFUSED: Final[int]
    BL_BLOCK_BELOW: Final[int]
    BL_TASK_VISIBLE_MAX_MS: Final[int]
    BL_TIER_POOL: Final[int]
    BL_LOWER_OFFLOAD: Final[int]
    BL_LOWER_ONBOARD: Final[int]
    BL_LOWER_PREFETCH: Final[int]
    BL_LOWER_REMOVE: Final[int]
    BL_LOWER_RETRY: Final[int]
    BL_LOWER_COLD: Final[int]
    BL_LOWER_KINDS: Final[int]
    BL_REMOVAL_NONE: Final[int]
    BL_REMOVAL_DONE: Final[int]
    BL_REMOVAL_FAILED: Final[int]
    BL_REMOVAL_REPLACED: Final[int]
    BL_LOWER_NO_BLOCK: Final[int]
    BL_NAME_PARENT: Final[int]
    BL_ENTRY_FREE: Final[int]
    BL_ENTRY_COMMITTED: Final[int]
    BL_ENTRY_REMOVED: Final[int]
    BL_ENTRY_TIER: Final[int]
    BL_ENTRY_KEPT: Final[int]
    BL_ENTRY_NAMED: Final[int]
    BL_EXTENT_FREE: Final[int]
    BL_EXTENT_OPEN: Final[int]
    BL_EXTENT_RETIRED: Final[int]
    BL_BLOCK_SIZE_MAX: Final[int]
    BL_PLACEMENT_INTERLEAVED: Final[int]
    BL_PLACEMENT_METADATA: Final[int]
    BL_ERROR_FORKED: Final[int]
    BL_ERROR_NO_SERVER: Final[int]
    BL_ERROR_TIMEOUT: Final[int]
    BL_ERROR_DEPOSED: Final[int]
    BL_ERROR_SERVER_ALIVE: Final[int]
    BL_ERROR_HOST_CLASH: Final[int]
    BL_ERROR_NO_LANE: Final[int]
    BL_ERROR_SESSION_LOST: Final[int]
    BL_ERROR_NO_METHOD: Final[int]
    BL_ERROR_BAD_REQUEST: Final[int]
    BL_ERROR_BAD_REPLY: Final[int]
    BL_ERROR_HANDLER: Final[int]
    BL_ERROR_NO_SPACE: Final[int]
    BL_ERROR_TABLE_FULL: Final[int]
    BL_ERROR_TOO_LARGE: Final[int]
    BL_ERROR_NO_GRANT: Final[int]
    BL_ERROR_PIN_LIMIT: Final[int]
    BL_ERROR_QUARANTINE: Final[int]
    BL_ERROR_EPOCH_DAMAGED: Final[int]
    BL_ERROR_SECOND_HOST: Final[int]
    BL_ERROR_LOBBY_BUSY: Final[int]
    BL_ERROR_QUOTA: Final[int]
    BL_ERROR_DEVICE_FAULT: Final[int]
    BL_ERROR_QUEUE_FULL: Final[int]
    BL_ERROR_SESSION_ALIVE: Final[int]
    BL_ERROR_RUNTIME_DIR: Final[int]
    BL_ERROR_OFFLOADING: Final[int]
    BL_ERROR_CACHE_LINE: Final[int]
    BL_ERROR_DRAINING: Final[int]
    BL_ERROR_REMOVALS_FULL: Final[int]
    BL_ERROR_NO_ROOM: Final[int]
    BL_CPU_CLFLUSHOPT: Final[int]
    BL_CPU_CLWB: Final[int]
    BL_CPU_SSE42: Final[int]
    BL_CPU_AVX2: Final[int]
    BL_CPU_AVX512: Final[int]
    BL_CPU_MOVDIR64B: Final[int]
    BL_CPU_PCLMUL: Final[int]
    BL_CPU_VPCLMUL: Final[int]
    BL_CPU_ENQCMD: Final[int]
    BL_CPU_WAITPKG: Final[int]
    BL_CPU_NEON: Final[int]
    BL_CPU_CRC32: Final[int]
    BL_REASON_NONE: Final[int]
    BL_REASON_FIRST: Final[int]
    BL_REASON_STOPPED: Final[int]
    BL_REASON_DECLARED: Final[int]
    BL_REASON_GONE: Final[int]
    BL_REASON_STUCK: Final[int]
    BL_REASON_SILENT: Final[int]
    BL_SUPERBLOCK_GOOD: Final[int]
    BL_SUPERBLOCK_EMPTY: Final[int]
    BL_SUPERBLOCK_FOREIGN: Final[int]
    BL_SUPERBLOCK_VERSION: Final[int]
    BL_SUPERBLOCK_DAMAGED: Final[int]
    BL_SUPERBLOCK_FORMAT: Final[int]
    BL_SUPERBLOCK_GEOMETRY: Final[int]
    BL_CALL_KEYS_MAX: Final[int]
    BL_METHOD_FUNCTION: Final[int]
    BL_FUNCTION_THREADS_MAX: Final[int]
    BL_REPORT_KINDS: Final[int]
    BL_REPORT_FIGURES: Final[int]
    BL_TRACE_ENTRIES: Final[int]
    BL_TRACE_HEAD_SIZE: Final[int]
    BL_TENANT_COUNT: Final[int]
    BL_SHARE_COUNT: Final[int]
    BL_SHARE_RULES: Final[int]
    BL_SHARE_WHOLE: Final[int]
    BL_LEVEL_NORMAL: Final[int]
    BL_LEVEL_LOW: Final[int]
    BL_LEVEL_HIGH: Final[int]
    BL_LEVEL_PINNED: Final[int]
    BL_LEVEL_COUNT: Final[int]
    BL_HINT_PART: Final[int]
    BL_METHOD_HINT: Final[int]
    BL_SESSION_WATCHED: Final[int]
    BL_SESSION_HEARTBEAT: Final[int]
    BL_SESSION_BROKEN: Final[int]
    BL_METHOD_SESSIONS: Final[int]
    BL_METHOD_REMOVAL_REASONS: Final[int]
    BL_METHOD_REMOVING: Final[int]
    BL_REMOVED_UNKNOWN: Final[int]
    BL_REMOVED_SPACE: Final[int]
    BL_REMOVED_ENTRY: Final[int]
    BL_REMOVED_CLIENT: Final[int]
    BL_REMOVED_RETIRED: Final[int]
    BL_CHANGE_REMOVED: Final[int]
    BL_CHANGE_STORED: Final[int]
    BL_LINK_NODES: Final[int]
    BL_LINK_MEMBERS: Final[int]
    BL_LINK_DEVICES: Final[int]
    BL_IO_IDLE: Final[int]
    BL_IO_QUEUED: Final[int]
    BL_IO_ADMITTED: Final[int]
    BL_IO_UNTHROTTLED: Final[int]
    BL_SPAN_SIZE: Final[int]
    BL_MAINTENANCE_FENCE: Final[int]
    BL_MAINTENANCE_INVALIDATE: Final[int]
    BL_MAINTENANCE_FLUSH: Final[int]
    BL_STORE_ENTRY_SIZE: Final[int]
    BL_STORE_SECTOR_SIZE: Final[int]
    BL_STORE_SECTOR_SLOTS: Final[int]
    BL_STORE_ABSENT: Final[int]
    BL_STORE_PRESENT: Final[int]
    BL_STORE_GRANTED: Final[int]
    BL_STORE_PENDING: Final[int]
    BL_DISK_THREADS: Final[int]
    BL_DISK_URING: Final[int]
    BL_FINDING_EPOCH_DAMAGED: Final[int]
    BL_FINDING_EPOCH_HALF: Final[int]
    BL_FINDING_EPOCH_STATE: Final[int]
    BL_FINDING_EPOCH_NONSENSE: Final[int]
    BL_FINDING_EPOCH_FUTURE: Final[int]
    BL_FINDING_HEARTBEAT_DAMAGED: Final[int]
    BL_FINDING_HEARTBEAT_STRANGE: Final[int]
    BL_FINDING_CANDIDATE_DAMAGED: Final[int]
    BL_FINDING_CANDIDATE_NONSENSE: Final[int]
    BL_FINDING_CANDIDATE_FUTURE: Final[int]
    BL_FINDING_LOBBY_REQUEST_DAMAGED: Final[int]
    BL_FINDING_LOBBY_REQUEST_NONSENSE: Final[int]
    BL_FINDING_LOBBY_REQUEST_HOST: Final[int]
    BL_FINDING_LOBBY_REQUEST_FUTURE: Final[int]
    BL_FINDING_LOBBY_REPLY_DAMAGED: Final[int]
    BL_FINDING_LOBBY_REPLY_NONSENSE: Final[int]
    BL_FINDING_LOBBY_REPLY_FUTURE: Final[int]
    BL_FINDING_SESSION_DAMAGED: Final[int]
    BL_FINDING_SESSION_STATE: Final[int]
    BL_FINDING_SESSION_HOST: Final[int]
    BL_FINDING_SESSION_NONSENSE: Final[int]
    BL_FINDING_SESSION_FUTURE: Final[int]
    BL_FINDING_SESSION_TWICE: Final[int]
    BL_FINDING_LANE_HEARTBEAT_DAMAGED: Final[int]
    BL_FINDING_REQUEST_DAMAGED: Final[int]
    BL_FINDING_REQUEST_NONSENSE: Final[int]
    BL_FINDING_REPLY_DAMAGED: Final[int]
    BL_FINDING_REPLY_NONSENSE: Final[int]
    BL_FINDING_EXTENT_DAMAGED: Final[int]
    BL_FINDING_EXTENT_PLACE: Final[int]
    BL_FINDING_EXTENT_STATE: Final[int]
    BL_FINDING_EXTENT_SIZE: Final[int]
    BL_FINDING_EXTENT_BEYOND: Final[int]
    BL_FINDING_EXTENT_FIT: Final[int]
    BL_FINDING_EXTENT_OVERLAP: Final[int]
    BL_FINDING_EXTENT_FUTURE: Final[int]
    BL_FINDING_ENTRY_DAMAGED: Final[int]
    BL_FINDING_ENTRY_STATE: Final[int]
    BL_FINDING_ENTRY_LENGTH: Final[int]
    BL_FINDING_ENTRY_CHUNK: Final[int]
    BL_FINDING_ENTRY_UNALIGNED: Final[int]
    BL_FINDING_ENTRY_BEYOND: Final[int]
    BL_FINDING_ENTRY_FUTURE: Final[int]
    BL_FINDING_ENTRY_HOMELESS: Final[int]
    BL_FINDING_ENTRY_OVERLAP: Final[int]
    BL_FINDING_ENTRY_TWICE: Final[int]
    BL_FINDING_ENTRY_GENERATION: Final[int]
    BL_FINDING_CHECKSUMS_DAMAGED: Final[int]
    BL_FINDING_PAYLOAD_DAMAGED: Final[int]
    BL_FINDING_NAME_DAMAGED: Final[int]
    BL_FINDING_NAME_FUTURE: Final[int]
    BL_FINDING_RESERVED: Final[int]
    BL_FINDING_STRAY: Final[int]
    BL_ENTRY_TORN: Final[int]
    BL_ACCEPTANCE_MESSAGE_PASSING: Final[int]
    BL_ACCEPTANCE_STORE_BUFFERING: Final[int]
    BL_ACCEPTANCE_TEARING_8: Final[int]
    BL_ACCEPTANCE_TEARING_16: Final[int]
    BL_ACCEPTANCE_TEARING_32: Final[int]
    BL_ACCEPTANCE_TEARING_64: Final[int]
    BL_ACCEPTANCE_LATE_EVICTION: Final[int]
    BL_ACCEPTANCE_PREFETCH: Final[int]
    BL_ACCEPTANCE_TEST_COUNT: Final[int]
    BL_ACCEPTANCE_SOFTWARE: Final[int]
    BL_ACCEPTANCE_BARE: Final[int]
    BL_ACCEPTANCE_MODE_COUNT: Final[int]
    BL_PREFIX_DEVICE: Final[int]
    BL_PREFIX_HOST: Final[int]
    BL_PREFIX_DISK: Final[int]
    BL_PREFIX_TIERS: Final[int]
    BL_PREFIX_SHARED: Final[int]
    BL_PREFIX_RANKS_MAX: Final[int]
    BL_PREFIX_BLOCKS_MAX: Final[int]
    BL_NO_BLOCK: Final[int]
    BL_EVICT_LRU: Final[int]
    BL_EVICT_S3FIFO: Final[int]
    BL_EVICT_COST: Final[int]
    BL_TIER_LRU: Final[int]
    BL_TIER_S3FIFO: Final[int]
    BL_TIER_COST: Final[int]
    BL_TIER_FIFO: Final[int]
    BL_DSA_NOOP: Final[int]
    BL_DSA_BATCH: Final[int]
    BL_DSA_DRAIN: Final[int]
    BL_DSA_MEMMOVE: Final[int]
    BL_DSA_FILL: Final[int]
    BL_DSA_COMPARE: Final[int]
    BL_DSA_DUALCAST: Final[int]
    BL_DSA_CRCGEN: Final[int]
    BL_DSA_COPY_CRC: Final[int]
    BL_DSA_CFLUSH: Final[int]
    BL_DSA_FENCE: Final[int]
    BL_DSA_BOF: Final[int]
    BL_DSA_CRAV: Final[int]
    BL_DSA_RCR: Final[int]
    BL_DSA_CR: Final[int]
    BL_DSA_CC: Final[int]
    BL_DSA_STORD: Final[int]
    BL_DSA_DRDBK: Final[int]
    BL_DSA_DSTS: Final[int]
    BL_DSA_SEED_READ: Final[int]
    BL_DSA_NONE: Final[int]
    BL_DSA_SUCCESS: Final[int]
    BL_DSA_SUCCESS_PRED: Final[int]
    BL_DSA_PAGE_FAULT: Final[int]
    BL_DSA_BATCH_FAIL: Final[int]
    BL_DSA_BATCH_PAGE_FAULT: Final[int]
    BL_DSA_BAD_OPCODE: Final[int]
    BL_DSA_INVALID_FLAGS: Final[int]
    BL_DSA_NOZERO_RESERVE: Final[int]
    BL_DSA_XFER_ERANGE: Final[int]
    BL_DSA_DESC_CNT_ERANGE: Final[int]
    BL_DSA_OVERLAP_BUFFERS: Final[int]
    BL_DSA_DCAST_ERR: Final[int]
    BL_DSA_DESCLIST_ALIGN: Final[int]
    BL_DSA_CRA_ALIGN: Final[int]
    BL_DSA_ADDR_ALIGN: Final[int]
    BL_DSA_HW_ERR1: Final[int]
    BL_DSA_STATUS_MASK: Final[int]
    BL_DSA_STATUS_WRITE: Final[int]
    BL_DSA_ENQCMD: Final[int]
    BL_DSA_MOVDIR64B: Final[int]
    BL_DSA_WRITE: Final[int]
    BL_DSA_FLUSH_NONE: Final[int]
    BL_DSA_FLUSH_CPU: Final[int]
    BL_DSA_FLUSH_DEVICE: Final[int]
    def bl_cpu_features(self, /) -> int: ...
    def bl_cpu_limit(self, mask: int, /) -> None: ...
    def bl_copy_isa(self, /) -> char_p: ...
    def bl_ntstore_copy(self, target: CData, source: CData | bytes, size: int, /) -> None: ...
    def bl_flush(self, address: CData | bytes, size: int, /) -> None: ...
    def bl_drop(self, address: CData | bytes, size: int, /) -> None: ...
    def bl_fence(self, /) -> None: ...
    def bl_crc32c(self, seed: int, bytes: CData | bytes, size: int, /) -> int: ...
    def bl_crash_arm(self, name: char_p | Null | bytes, passage: int, stop: int, words: int, /) -> int: ...
    def bl_geometry_make(self, config: bl_pool_config | Null | Sequence[bl_pool_config], out: bl_geometry | Null, /) -> int: ...
    def bl_superblock_make(self, config: bl_pool_config | Null | Sequence[bl_pool_config], geometry: bl_geometry | Null | Sequence[bl_geometry], device_index: int, coherence: int, out: bl_superblock | Null, /) -> None: ...
    def bl_superblock_fault(self, superblock: bl_superblock | Null | Sequence[bl_superblock], /) -> int: ...
    def bl_device_map(self, fd: int, offset: int, size: int, out: CPointer[void_p] | Null, /) -> int: ...
    def bl_device_unmap(self, address: CData, size: int, /) -> int: ...
    def bl_device_populate(self, address: CData, size: int, /) -> int: ...
    def bl_device_read(self, address: CData, target: CData, size: int, /) -> int: ...
    def bl_device_write(self, address: CData, source: CData | bytes, size: int, /) -> int: ...
    def bl_pool_open(self, superblocks: bl_superblock | Null | Sequence[bl_superblock], devices: CPointer[void_p] | Null, out: CPointer[bl_pool] | Null, /) -> int: ...
    def bl_pool_close(self, pool: bl_pool | Null, /) -> None: ...
    def bl_pool_back(self, pool: bl_pool | Null, fds: int32_p | Null | Sequence[int], offsets: uint64_p | Null | Sequence[int], /) -> None: ...
    def bl_pool_reserve(self, pool: bl_pool | Null, /) -> int: ...
    def bl_pool_prefault(self, pool: bl_pool | Null, offset: int, size: int, /) -> None: ...
    def bl_pool_format(self, pool: bl_pool | Null, superblocks: bl_superblock | Null | Sequence[bl_superblock], zeroed: int, /) -> int: ...
    def bl_pool_address(self, pool: bl_pool | Null, offset: int, /) -> void_p: ...
    def bl_pool_device(self, pool: bl_pool | Null, device: int, /) -> void_p: ...
    def bl_pool_write(self, pool: bl_pool | Null, offset: int, source: CData | bytes, size: int, /) -> int: ...
    def bl_pool_read(self, pool: bl_pool | Null, offset: int, target: CData, size: int, /) -> int: ...
    def bl_server_create(self, pool: bl_pool | Null, directory: char_p | Null | bytes, host: int, out: CPointer[bl_server] | Null, /) -> int: ...
    def bl_server_destroy(self, server: bl_server | Null, /) -> None: ...
    def bl_server_heartbeat_lost(self, server: bl_server | Null, ns: int, /) -> None: ...
    def bl_server_limit(self, server: bl_server | Null, quota: bl_quota | Null | Sequence[bl_quota], /) -> None: ...
    def bl_server_drain(self, server: bl_server | Null, draining: int, /) -> None: ...
    def bl_server_forked(self, server: bl_server | Null, /) -> None: ...
    def bl_server_handle_method(self, server: bl_server | Null, method: int, handler: bl_handler, context: CData, /) -> int: ...
    def bl_server_declare_gone(self, server: bl_server | Null, /) -> int: ...
    def bl_server_serve_lanes(self, server: bl_server | Null, /) -> int: ...
    def bl_server_watch(self, server: bl_server | Null, lost_ns: int, timeout_ns: int, /) -> int: ...
    def bl_server_run(self, server: bl_server | Null, /) -> int: ...
    def bl_server_stop(self, server: bl_server | Null, /) -> None: ...
    def bl_server_describe(self, server: bl_server | Null, out: bl_server_stat | Null, /) -> None: ...
    def bl_session_open(self, pool: bl_pool | Null, directory: char_p | Null | bytes, host: int, timeout_ns: int, out: CPointer[bl_session] | Null, /) -> int: ...
    def bl_session_close(self, session: bl_session | Null, /) -> None: ...
    def bl_session_forked(self, session: bl_session | Null, /) -> None: ...
    def bl_session_describe(self, session: bl_session | Null, out: bl_session_stat | Null, /) -> None: ...
    def bl_session_call(self, session: bl_session | Null, message: bl_message | Null | Sequence[bl_message], timeout_ns: int, /) -> int: ...
    def bl_session_call_bytes(self, session: bl_session | Null, method: int, request: uint8_p | Null | bytes, request_size: int, reply: uint8_p | Null, reply_capacity: int, timeout_ns: int, /) -> int: ...
    def bl_session_pump(self, session: bl_session | Null, pump: bl_pump | Null | Sequence[bl_pump], timeout_ns: int, /) -> int: ...
    def bl_echo_handler(self, context: CData, call: bl_call | Null, /) -> int: ...
    def bl_function_open(self, server: bl_server | Null, /) -> int: ...
    def bl_function_handler(self, server: CData, call: bl_call | Null, /) -> int: ...
    def bl_function_take(self, server: bl_server | Null, out: bl_function_call | Null, /) -> int: ...
    def bl_function_answer(self, server: bl_server | Null, number: int, reply: uint8_p | Null | bytes, size: int, status: int, /) -> int: ...
    def bl_server_calls(self, server: bl_server | Null, out: bl_calls | Null, count: int, /) -> None: ...
    def bl_report_handler(self, server: CData, call: bl_call | Null, /) -> int: ...
    def bl_server_reported(self, server: bl_server | Null, kind: int, figures: uint64_p | Null, /) -> None: ...
    def bl_index_create(self, server: bl_server | Null, eviction: int, out: CPointer[bl_index] | Null, /) -> int: ...
    def bl_index_destroy(self, index: bl_index | Null, /) -> None: ...
    def bl_index_serve(self, index: bl_index | Null, /) -> int: ...
    def bl_index_describe(self, index: bl_index | Null, out: bl_index_stat | Null, /) -> None: ...
    def bl_index_tenants(self, index: bl_index | Null, out: bl_tenant | Null, count: int, /) -> int: ...
    def bl_index_share(self, index: bl_index | Null, parts: uint32_p | Null | Sequence[int], count: int, rules: bl_share_rule | Null | Sequence[bl_share_rule], rule_count: int, /) -> int: ...
    def bl_index_shares(self, index: bl_index | Null, out: bl_share_view | Null, count: int, /) -> int: ...
    def bl_index_hints(self, index: bl_index | Null, out: bl_hint_stat | Null, /) -> None: ...
    def bl_index_hint_part(self, index: bl_index | Null, part: int, /) -> int: ...
    def bl_index_map(self, index: bl_index | Null, cell_count: int, out: bl_map_cell | Null, /) -> None: ...
    def bl_index_refused(self, index: bl_index | Null, error: int, /) -> int: ...
    def bl_index_sessions(self, index: bl_index | Null, first: int, out: bl_session_view | Null, count: int, /) -> int: ...
    def bl_lower_attach(self, index: bl_index | Null, count_max: int, waits: int, unknown: int, token: int, /) -> int: ...
    def bl_lower_name_tiers(self, index: bl_index | Null, id: uint64_p | Sequence[int], /) -> None: ...
    def bl_lower_give_up(self, index: bl_index | Null, id: int, /) -> int: ...
    def bl_lower_reported(self, index: bl_index | Null, /) -> None: ...
    def bl_lower_wait(self, index: bl_index | Null, kinds: int, timeout_ns: int, /) -> int: ...
    def bl_lower_describe(self, index: bl_index | Null, out: bl_lower_stat | Null, /) -> None: ...
    def bl_journal_attach(self, index: bl_index | Null, room: int, /) -> int: ...
    def bl_journal_take(self, index: bl_index | Null, changes: bl_change | Null, count: int, lost: uint64_p | Null, /) -> int: ...
    def bl_events_create(self, out: CPointer[bl_events] | Null, line_count: int, /) -> int: ...
    def bl_events_destroy(self, events: bl_events | Null, /) -> None: ...
    def bl_events_apply(self, events: bl_events | Null, changes: bl_change | Null | Sequence[bl_change], count: int, rows: bl_event | Null, /) -> int: ...
    def bl_events_count(self, events: bl_events | Null, /) -> int: ...
    def bl_events_all(self, events: bl_events | Null, rows: bl_event | Null, /) -> int: ...
    def bl_names_read(self, pool: bl_pool | Null, half: int, first: uint32_p | Null, count: int, names: bl_change | Null, /) -> int: ...
    def bl_lookup(self, session: bl_session | Null, keys: uint64_p | Null | Sequence[int], count: int, flags: int, records: bl_block_record | Null, state: uint32_p | Null, timeout_ns: int, /) -> int: ...
    def bl_reserve(self, session: bl_session | Null, keys: uint64_p | Null | Sequence[int], count: int, what: bl_block_request | Null | Sequence[bl_block_request], records: bl_block_record | Null, timeout_ns: int, /) -> int: ...
    def bl_commit_blocks(self, session: bl_session | Null, commits: bl_commit | Null | Sequence[bl_commit], count: int, statuses: int32_p | Null, timeout_ns: int, /) -> int: ...
    def bl_abort_blocks(self, session: bl_session | Null, commits: bl_commit | Null | Sequence[bl_commit], count: int, timeout_ns: int, /) -> int: ...
    def bl_release_blocks(self, session: bl_session | Null, records: bl_block_record | Null | Sequence[bl_block_record], count: int, timeout_ns: int, /) -> int: ...
    def bl_remove_blocks(self, session: bl_session | Null, keys: uint64_p | Null | Sequence[int], count: int, timeout_ns: int, /) -> int: ...
    def bl_hint_blocks(self, session: bl_session | Null, keys: uint64_p | Null | Sequence[int], count: int, level: int, ttl_ms: int, refused: uint32_p | Null, timeout_ns: int, /) -> int: ...
    def bl_index_get_stat(self, session: bl_session | Null, out: bl_index_stat | Null, timeout_ns: int, /) -> int: ...
    def bl_onboard(self, session: bl_session | Null, keys: uint64_p | Null | Sequence[int], count: int, kind: int, timeout_ns: int, /) -> int: ...
    def bl_removing(self, session: bl_session | Null, keys: uint64_p | Null | Sequence[int], count: int, tiers: uint8_p | Null, timeout_ns: int, /) -> int: ...
    def bl_tiers(self, session: bl_session | Null, keys: uint64_p | Null | Sequence[int], count: int, tiers: uint8_p | Null, timeout_ns: int, /) -> int: ...
    def bl_lower_take(self, session: bl_session | Null, token: int, kind: int, tier: int, records: bl_lower_record | Null, count: int, timeout_ns: int, /) -> int: ...
    def bl_lower_report(self, session: bl_session | Null, token: int, notes: bl_lower_note | Null | Sequence[bl_lower_note], count: int, timeout_ns: int, /) -> int: ...
    def bl_task_claim(self, session: bl_session | Null, queue: int, visible_ms: int, out: bl_task | Null, timeout_ns: int, /) -> int: ...
    def bl_task_extend(self, session: bl_session | Null, task: bl_task | Null | Sequence[bl_task], visible_ms: int, timeout_ns: int, /) -> int: ...
    def bl_task_withdraw(self, session: bl_session | Null, key: uint64_p | Null | Sequence[int], timeout_ns: int, /) -> int: ...
    def bl_task_count(self, session: bl_session | Null, queue: int, out: bl_task_counts | Null, timeout_ns: int, /) -> int: ...
    def bl_tokens_init(self, bucket: bl_tokens | Null, rate: int, limit: int, threshold: int, capped: int, now_ns: int, /) -> int: ...
    def bl_tokens_grab(self, bucket: bl_tokens | Null, tokens: int, /) -> int: ...
    def bl_tokens_lacks(self, bucket: bl_tokens | Null | Sequence[bl_tokens], ticket: int, /) -> int: ...
    def bl_tokens_replenish(self, bucket: bl_tokens | Null, now_ns: int, /) -> None: ...
    def bl_tokens_refund(self, bucket: bl_tokens | Null, tokens: int, /) -> None: ...
    def bl_tokens_release(self, bucket: bl_tokens | Null, tokens: int, /) -> None: ...
    def bl_tokens_duration_ns(self, bucket: bl_tokens | Null | Sequence[bl_tokens], tokens: int, /) -> int: ...
    def bl_direction_init(self, direction: bl_direction | Null, limit: int, forgiving: int, capped: int, now_ns: int, /) -> int: ...
    def bl_direction_valid(self, direction: bl_direction | Null | Sequence[bl_direction], /) -> int: ...
    def bl_direction_add(self, direction: bl_direction | Null, parent: int, shares: int, /) -> int: ...
    def bl_direction_set_shares(self, direction: bl_direction | Null, node: int, shares: int, /) -> int: ...
    def bl_direction_limit(self, direction: bl_direction | Null, node: int, bytes_per_s: int, burst: int, now_ns: int, /) -> int: ...
    def bl_direction_reap(self, direction: bl_direction | Null, now_ns: int, /) -> int: ...
    def bl_queue_create(self, queue: CPointer[bl_queue] | Null, direction: bl_direction | Null, goal_ns: int, now_ns: int, /) -> int: ...
    def bl_queue_destroy(self, queue: bl_queue | Null, /) -> None: ...
    def bl_queue_add_device(self, queue: bl_queue | Null, bucket: bl_tokens | Null, /) -> int: ...
    def bl_queue_push(self, queue: bl_queue | Null, node: int, tokens: int, bytes: int, device_tokens: uint64_p | Null | Sequence[int], id: int, now_ns: int, /) -> int: ...
    def bl_queue_cancel(self, queue: bl_queue | Null, waiter: int, /) -> int: ...
    def bl_queue_pop(self, queue: bl_queue | Null, now_ns: int, admission: bl_admission | Null, /) -> int: ...
    def bl_queue_plug(self, queue: bl_queue | Null, node: int, plugged: int, /) -> int: ...
    def bl_queue_poll(self, queue: bl_queue | Null, now_ns: int, admission: bl_admission | Null, wait_ns: uint64_p | Null, /) -> int: ...
    def bl_queue_rest(self, queue: bl_queue | Null, /) -> None: ...
    def bl_queue_complete(self, queue: bl_queue | Null, waiter: int, now_ns: int, /) -> None: ...
    def bl_queue_stat_read(self, queue: bl_queue | Null, stat: bl_queue_stat | Null, /) -> None: ...
    def bl_io_queue_create(self, io_queue: CPointer[bl_io_queue] | Null, read: bl_direction | Null, write: bl_direction | Null, goal_ns: int, price: bl_price | Null | Sequence[bl_price], pool: bl_pool | Null, /) -> int: ...
    def bl_io_queue_destroy(self, io_queue: bl_io_queue | Null, /) -> None: ...
    def bl_io_queue_add_device(self, io_queue: bl_io_queue | Null, bucket: bl_tokens | Null, /) -> int: ...
    def bl_io_queue_widen(self, io_queue: bl_io_queue | Null, bytes: int, count: int, /) -> None: ...
    def bl_io_queue_acquire(self, io_queue: bl_io_queue | Null, request: bl_io_request | Null, device_bytes: uint64_p | Null | Sequence[int], timeout_ns: int, /) -> int: ...
    def bl_io_queue_release(self, io_queue: bl_io_queue | Null, request: bl_io_request | Null, /) -> None: ...
    def bl_io_queue_stat(self, io_queue: bl_io_queue | Null, direction: int, stat: bl_queue_stat | Null, /) -> None: ...
    def bl_io_queue_stalls(self, io_queue: bl_io_queue | Null, /) -> int: ...
    def bl_io_queue_transfer_stats(self, io_queue: bl_io_queue | Null, node: int, stats: bl_transfer_stats | Null, /) -> None: ...
    def bl_io_queue_stop(self, io_queue: bl_io_queue | Null, stopped: int, /) -> None: ...
    def bl_io_queue_now_ns(self, /) -> int: ...
    def bl_spans_touch(self, windows: bl_windows | Null | Sequence[bl_windows], plan: bl_plan | Null | Sequence[bl_plan], touched: uint8_p | Null, /) -> int: ...
    def bl_spans_reach(self, windows: bl_windows | Null | Sequence[bl_windows], plan: bl_plan | Null | Sequence[bl_plan], reached: uint8_p | Null, /) -> None: ...
    def bl_spans_make(self, windows: bl_windows | Null | Sequence[bl_windows], plan: bl_plan | Null | Sequence[bl_plan], shared: int64_p | Null | Sequence[int], write: int, spans: bl_span | Null, /) -> int: ...
    def bl_spans_sum(self, spans: bl_span | Null | Sequence[bl_span], sums: uint32_p | Null | Sequence[int], count: int, plan: bl_plan | Null | Sequence[bl_plan], write: int, /) -> int: ...
    def bl_plan_blocks(self, addresses: uint64_p | Null | Sequence[int], sizes: uint64_p | Null | Sequence[int], offsets: uint64_p | Null | Sequence[int], block_count: int, fragment_count: int, chunk_size: int, pieces: bl_piece | Null, chunks: bl_chunk | Null, /) -> int: ...
    def bl_plan_within(self, plan: bl_plan | Null | Sequence[bl_plan], size: int, /) -> int: ...
    def bl_plan_check(self, pool: bl_pool | Null, plan: bl_plan | Null | Sequence[bl_plan], /) -> int: ...
    def bl_plan_maintenance(self, pool: bl_pool | Null, plan: bl_plan | Null | Sequence[bl_plan], maintenance: int, threads: int, /) -> int: ...
    def bl_copy_defaults(self, settings: bl_copy_settings | Null, /) -> None: ...
    def bl_plan_write(self, pool: bl_pool | Null, plan: bl_plan | Null | Sequence[bl_plan], settings: bl_copy_settings | Null | Sequence[bl_copy_settings], io_queue: bl_io_queue | Null, transfer_class: int, /) -> int: ...
    def bl_plan_read(self, pool: bl_pool | Null, plan: bl_plan | Null | Sequence[bl_plan], settings: bl_copy_settings | Null | Sequence[bl_copy_settings], io_queue: bl_io_queue | Null, transfer_class: int, /) -> int: ...
    def bl_store_create(self, out: CPointer[bl_store] | Null, id: int, slot_count: int, data_offset: int, stripe_count: int, policy: int, /) -> int: ...
    def bl_store_destroy(self, store: bl_store | Null, /) -> None: ...
    def bl_store_entries(self, store: bl_store | Null, /) -> uint8_p: ...
    def bl_store_expect(self, store: bl_store | Null, sector_count: int, /) -> None: ...
    def bl_store_check(self, store: bl_store | Null, sector: int, count: int, /) -> None: ...
    def bl_store_claim(self, store: bl_store | Null, sector: int, count: int, /) -> None: ...
    def bl_store_recover(self, store: bl_store | Null, /) -> int: ...
    def bl_store_find(self, store: bl_store | Null, keys: uint64_p | Null | Sequence[int], count: int, records: bl_store_record | Null, places: bl_store_place | Null, /) -> int: ...
    def bl_store_unpin(self, store: bl_store | Null, places: bl_store_place | Null | Sequence[bl_store_place], count: int, /) -> None: ...
    def bl_store_has(self, store: bl_store | Null, keys: uint64_p | Null | Sequence[int], count: int, found: uint8_p | Null, /) -> None: ...
    def bl_store_reserve(self, store: bl_store | Null, records: bl_store_record | Null | Sequence[bl_store_record], count: int, places: bl_store_place | Null, /) -> int: ...
    def bl_store_fill(self, store: bl_store | Null, places: bl_store_place | Null | Sequence[bl_store_place], count: int, /) -> None: ...
    def bl_store_commit(self, store: bl_store | Null, places: bl_store_place | Null | Sequence[bl_store_place], count: int, /) -> None: ...
    def bl_store_abort(self, store: bl_store | Null, places: bl_store_place | Null | Sequence[bl_store_place], count: int, /) -> None: ...
    def bl_store_remove(self, store: bl_store | Null, keys: uint64_p | Null | Sequence[int], count: int, /) -> int: ...
    def bl_store_keys(self, store: bl_store | Null, keys: uint64_p | Null, room: int, /) -> int: ...
    def bl_store_take_evicted(self, store: bl_store | Null, keys: uint64_p | Null, room: int, /) -> int: ...
    def bl_store_take(self, store: bl_store | Null, sectors: uint32_p | Null, bytes: uint8_p | Null, room: int, /) -> int: ...
    def bl_store_mark_dirty(self, store: bl_store | Null, sectors: uint32_p | Null | Sequence[int], count: int, /) -> None: ...
    def bl_store_stat_read(self, store: bl_store | Null, out: bl_store_stat | Null, /) -> None: ...
    def bl_disk_create(self, out: CPointer[bl_disk] | Null, file: int, engine: int, depth: int, /) -> int: ...
    def bl_disk_destroy(self, disk: bl_disk | Null, /) -> None: ...
    def bl_disk_read(self, disk: bl_disk | Null, requests: bl_disk_request | Null, count: int, /) -> int: ...
    def bl_disk_write(self, disk: bl_disk | Null, requests: bl_disk_request | Null, count: int, /) -> int: ...
    def bl_disk_sync(self, disk: bl_disk | Null, /) -> int: ...
    def bl_kv_put(self, session: bl_session | Null, batch: bl_kv_batch | Null | Sequence[bl_kv_batch], states: uint8_p | Null, statuses: int32_p | Null, /) -> int: ...
    def bl_kv_get(self, session: bl_session | Null, batch: bl_kv_batch | Null | Sequence[bl_kv_batch], states: uint8_p | Null, mismatch_count: uint64_p | Null, /) -> int: ...
    def bl_kv_put_begin(self, session: bl_session | Null, batch: bl_kv_batch | Null | Sequence[bl_kv_batch], states: uint8_p | Null, statuses: int32_p | Null, offsets: uint64_p | Null, out: CPointer[bl_kv_pending] | Null, /) -> int: ...
    def bl_kv_put_end(self, session: bl_session | Null, pending: bl_kv_pending | Null, checksums: uint32_p | Null | Sequence[int], written: int, states: uint8_p | Null, statuses: int32_p | Null, /) -> int: ...
    def bl_kv_get_begin(self, session: bl_session | Null, batch: bl_kv_batch | Null | Sequence[bl_kv_batch], states: uint8_p | Null, offsets: uint64_p | Null, checksums: uint32_p | Null, out: CPointer[bl_kv_pending] | Null, /) -> int: ...
    def bl_kv_get_end(self, session: bl_session | Null, pending: bl_kv_pending | Null, copied: int, states: uint8_p | Null, mismatch_count: uint64_p | Null, /) -> int: ...
    def bl_fold_keys(self, digests: uint8_p | Null | bytes, digest_size: int, count: int, name_space: uint8_p | bytes, keys: uint64_p | Null, /) -> int: ...
    def bl_check_pool(self, pool: bl_pool | Null, payload: int, findings: bl_finding | Null, count_max: int, report: bl_check_report | Null, io_queue: bl_io_queue | Null, transfer_class: int, /) -> int: ...
    def bl_entries_read(self, pool: bl_pool | Null, half: int, first: int, count: int, entries: bl_entry | Null, /) -> int: ...
    def bl_repair_finding(self, pool: bl_pool | Null, finding: bl_finding | Null | Sequence[bl_finding], /) -> int: ...
    def bl_acceptance_create(self, pool: bl_pool | Null, config: bl_acceptance_config | Null | Sequence[bl_acceptance_config], out: CPointer[bl_acceptance] | Null, /) -> int: ...
    def bl_acceptance_destroy(self, acceptance: bl_acceptance | Null, /) -> None: ...
    def bl_acceptance_run(self, acceptance: bl_acceptance | Null, /) -> int: ...
    def bl_acceptance_stop(self, acceptance: bl_acceptance | Null, /) -> None: ...
    def bl_acceptance_cells(self, acceptance: bl_acceptance | Null, out: CPointer[bl_acceptance_cell] | Null, /) -> int: ...
    def bl_prefix_create(self, out: CPointer[bl_prefix] | Null, rank_max: int, block_max: int, name_max: int, /) -> int: ...
    def bl_prefix_destroy(self, prefix: bl_prefix | Null, /) -> None: ...
    def bl_prefix_store(self, prefix: bl_prefix | Null, rank: int, tier: int, publisher: int, parent: uint64_p | Null | Sequence[int], names: uint64_p | Null | Sequence[int], locals: uint64_p | Null | Sequence[int], count: int, outcome: bl_prefix_outcome | Null, /) -> int: ...
    def bl_prefix_hold(self, prefix: bl_prefix | Null, rank: int, tier: int, publisher: int, names: uint64_p | Null | Sequence[int], count: int, outcome: bl_prefix_outcome | Null, /) -> int: ...
    def bl_prefix_remove(self, prefix: bl_prefix | Null, rank: int, tier: int, names: uint64_p | Null | Sequence[int], count: int, outcome: bl_prefix_outcome | Null, /) -> int: ...
    def bl_prefix_clear(self, prefix: bl_prefix | Null, rank: int, outcome: bl_prefix_outcome | Null, /) -> int: ...
    def bl_prefix_held(self, prefix: bl_prefix | Null, rank: int, tier: int, /) -> int: ...
    def bl_prefix_find(self, prefix: bl_prefix | Null, locals: uint64_p | Null | Sequence[int], count: int, early_exit: int, matches: bl_prefix_match | Null, shared: uint32_p | Null, /) -> int: ...
    def bl_prefix_dump(self, prefix: bl_prefix | Null, rank: int, rows: bl_prefix_row | Null, room: int, /) -> int: ...
    def bl_prefix_paths(self, prefix: bl_prefix | Null, locals: uint64_p | Null | Sequence[int], count: int, paths: uint64_p | Null, /) -> None: ...
    def bl_prefix_stat_read(self, prefix: bl_prefix | Null, stat: bl_prefix_stat | Null, /) -> None: ...
    def bl_xxh3(self, data: CData | bytes, size: int, seed: int, /) -> int: ...
    def bl_hash_windows(self, data: uint8_p | Null | bytes, stride: int, window: int, seed: int, hashes: uint64_p | Null, count: int, /) -> None: ...
    def bl_hash_chain(self, hashes: uint64_p | Null | Sequence[int], count: int, seed: int, chained: uint64_p | Null, /) -> None: ...
    def bl_sent_create(self, out: CPointer[bl_sent] | Null, tree: bl_prefix | Null, rank_max: int, block_max: int, ttl_s: float, /) -> int: ...
    def bl_sent_destroy(self, sent: bl_sent | Null, /) -> None: ...
    def bl_sent_add(self, sent: bl_sent | Null, rank: int, locals: uint64_p | Null | Sequence[int], count: int, now: float, /) -> None: ...
    def bl_sent_expire(self, sent: bl_sent | Null, now: float, /) -> None: ...
    def bl_sent_clear(self, sent: bl_sent | Null, rank: int, /) -> None: ...
    def bl_sent_count(self, sent: bl_sent | Null, /) -> int: ...
    def bl_active_create(self, out: CPointer[bl_active] | Null, /) -> int: ...
    def bl_active_destroy(self, active: bl_active | Null, /) -> None: ...
    def bl_active_count(self, active: bl_active | Null, /) -> int: ...
    def bl_active_holders(self, active: bl_active | Null, block: int, /) -> int: ...
    def bl_active_add(self, active: bl_active | Null, blocks: uint64_p | Null | Sequence[int], count: int, /) -> int: ...
    def bl_active_remove(self, active: bl_active | Null, blocks: uint64_p | Null | Sequence[int], count: int, /) -> None: ...
    def bl_prefills_tokens(self, prefills: bl_prefills | Null | Sequence[bl_prefills], now: float, /) -> int: ...
    def bl_prefills_seconds(self, prefills: bl_prefills | Null | Sequence[bl_prefills], now: float, /) -> float: ...
    def bl_loads_refresh(self, loads: CPointer[bl_load] | Null, prefills: CPointer[bl_prefills] | Null, count: int, now: float, /) -> None: ...
    def bl_candidates_fill(self, loads: CPointer[bl_load] | Null, active: CPointer[bl_active] | Null, worker_count: int, blocks: uint64_p | Null | Sequence[int], count: int, alone: double_p | Null | Sequence[int], alone_count: int, rows: bl_candidate | Null, /) -> None: ...
    def bl_load_share_write(self, row: bl_load_share | Null, load: bl_load | Null | Sequence[bl_load], prefills: bl_prefills | Null | Sequence[bl_prefills], /) -> None: ...
    def bl_load_share_add(self, table: bl_load_table | Null | Sequence[bl_load_table], slot: int, now: float, load: bl_load | Null, /) -> None: ...
    def bl_load_shares_add(self, table: bl_load_table | Null | Sequence[bl_load_table], slots: uint32_p | Null | Sequence[int], count: int, now: float, rows: bl_candidate | Null, /) -> None: ...
    def bl_estimates(self, costs: bl_costs | Null | Sequence[bl_costs], input_tokens: int, rows: bl_candidate | Null | Sequence[bl_candidate], fetched: int64_p | Null | Sequence[int], count: int, estimates: bl_estimate | Null, /) -> None: ...
    def bl_least_costs(self, pressure: bl_pressure | Null | Sequence[bl_pressure], rows: bl_candidate | Null | Sequence[bl_candidate], estimates: bl_estimate | Null | Sequence[bl_estimate], count: int, costs: double_p | Null, /) -> None: ...
    def bl_hash_create(self, out: CPointer[bl_hash] | Null, count_max: int, /) -> int: ...
    def bl_hash_destroy(self, hash: bl_hash | Null, /) -> None: ...
    def bl_hash_prefetch(self, hash: bl_hash | Null, key: uint64_p | Sequence[int], /) -> None: ...
    def bl_hash_find(self, hash: bl_hash | Null, key: uint64_p | Sequence[int], /) -> int: ...
    def bl_hash_add(self, hash: bl_hash | Null, key: uint64_p | Sequence[int], block: int, /) -> int: ...
    def bl_hash_remove(self, hash: bl_hash | Null, key: uint64_p | Sequence[int], /) -> int: ...
    def bl_hash_count(self, hash: bl_hash | Null, /) -> int: ...
    def bl_tier_create(self, out: CPointer[bl_tier] | Null, id_count: int, capacity: int, order: int, block_tokens: int, /) -> int: ...
    def bl_tier_destroy(self, tier: bl_tier | Null, /) -> None: ...
    def bl_tier_lead(self, tier: CPointer[bl_tier] | Null, tier_count: int, id: uint32_p | Null | Sequence[int], count: int, lead: uint32_p | Null, /) -> None: ...
    def bl_tier_touch(self, tier: bl_tier | Null, id: uint32_p | Null | Sequence[int], count: int, /) -> None: ...
    def bl_tier_put(self, tier: bl_tier | Null, id: uint32_p | Null | Sequence[int], count: int, /) -> int: ...
    def bl_tier_hold(self, tier: bl_tier | Null, id: uint32_p | Null | Sequence[int], count: int, /) -> None: ...
    def bl_tier_drop(self, tier: bl_tier | Null, id: uint32_p | Null | Sequence[int], count: int, /) -> None: ...
    def bl_tier_hint(self, tier: bl_tier | Null, id: uint32_p | Null | Sequence[int], count: int, level: int, budget: int, given: uint8_p | Null, /) -> int: ...
    def bl_tier_cool(self, tier: bl_tier | Null, id: uint32_p | Null | Sequence[int], count: int, /) -> None: ...
    def bl_tier_reserve(self, tier: bl_tier | Null, count: int, /) -> int: ...
    def bl_tier_release(self, tier: bl_tier | Null, count: int, /) -> None: ...
    def bl_tier_look(self, tier: bl_tier | Null, /) -> bl_tier_stat: ...
    def bl_dsa_queue_open(self, fd: int, way: int, limits: bl_dsa_limits | Null | Sequence[bl_dsa_limits], out: CPointer[bl_dsa_queue] | Null, /) -> int: ...
    def bl_dsa_submit(self, queue: bl_dsa_queue | Null, descriptor: bl_dsa_descriptor | Null | Sequence[bl_dsa_descriptor], /) -> int: ...
    def bl_dsa_queue_ended(self, queue: bl_dsa_queue | Null, /) -> None: ...
    def bl_dsa_queue_close(self, queue: bl_dsa_queue | Null, /) -> None: ...
    def bl_dsa_soft_open(self, pool: bl_pool | Null, limits: bl_dsa_limits | Null | Sequence[bl_dsa_limits], out: CPointer[bl_dsa_queue] | Null, /) -> int: ...
    def bl_dsa_engine_open(self, pool: bl_pool | Null, queue: bl_dsa_queue | Null, limits: bl_dsa_limits | Null | Sequence[bl_dsa_limits], rules: bl_dsa_rules | Null | Sequence[bl_dsa_rules], out: CPointer[bl_dsa_engine] | Null, /) -> int: ...
    def bl_dsa_engine_close(self, engine: bl_dsa_engine | Null, /) -> None: ...
    def bl_dsa_start(self, engine: bl_dsa_engine | Null, plan: bl_plan | Null | Sequence[bl_plan], is_read: int, out: CPointer[bl_dsa_transfer] | Null, /) -> int: ...
    def bl_dsa_poll(self, engine: bl_dsa_engine | Null, /) -> int: ...
    def bl_dsa_wait(self, engine: bl_dsa_engine | Null, transfer: bl_dsa_transfer | Null, timeout_ns: int, /) -> int: ...
    def bl_dsa_ended(self, transfer: bl_dsa_transfer | Null, /) -> int: ...
    def bl_dsa_status(self, transfer: bl_dsa_transfer | Null, /) -> int: ...
    def bl_dsa_free(self, transfer: bl_dsa_transfer | Null, /) -> None: ...
    def bl_dsa_engine_stat(self, engine: bl_dsa_engine | Null, out: bl_dsa_stat | Null, /) -> None: ...
    def bl_dsa_write_one(self, engine: bl_dsa_engine | Null, offset: int, buffer: CData, size: int, /) -> int: ...
    def bl_dsa_read_one(self, engine: bl_dsa_engine | Null, offset: int, buffer: CData, size: int, /) -> int: ...
    def bl_python_handler(self, context: CData, call: bl_call | Null, /) -> int: ...

ffi: Final[Ffi]
lib: Final[Lib]
