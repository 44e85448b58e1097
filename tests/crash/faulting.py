# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Calls every C function that is given a pool, over devices that fail: ``python faulting.py
DIRECTORY``.

Prints a line of JSON before and after each call, so a call that ends the process is named in the
last line. The devices are truncated to zero bytes between ``ready`` and ``call``.
"""

import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from one_block import TIMEOUT_NS, batch_of
from support.soft_dsa import soft_queue

from beluga import Client, IndexServer, Pool
from beluga._ffi import ffi, lib

HEADERS = Path(__file__).resolve().parents[2] / "csrc" / "api"
POOLED = r"bl_(?:pool|session|server|index|acceptance|dsa_engine|kv_pending)"
SIZE = 8 << 20


def functions() -> set[str]:
    """Return the functions of csrc/api/ with a parameter that leads to a pool's memory."""
    names = set[str]()
    for header in HEADERS.glob("*.h"):
        text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
        for name, parameters in re.findall(r"\b(bl_\w+)\(([^;{}()]*)\);", text):
            if re.search(rf"\b{POOLED} \*\w", parameters):
                names.add(name)
    return names


@dataclasses.dataclass
class Scene:
    """A pool with a server that serves it, and what the functions need."""

    pool: Pool
    paths: list[Path]
    client: Client | None = None
    server: Any = None
    index: Any = None
    keep: list[Any] = dataclasses.field(default_factory=list)

    def session(self) -> Any:
        assert self.client is not None
        return self.client.session

    def data(self) -> Any:
        self.keep.append(ffi.new("uint8_t[65536]"))
        return self.keep[-1]

    def cut(self) -> None:
        for path in self.paths:
            os.truncate(path, 0)

    def batch(self) -> Any:
        self.keep.append(batch_of(self.data()))
        return self.keep[-1][0]

    def plan(self) -> Any:
        pieces, chunks = ffi.new("bl_piece[1]"), ffi.new("bl_chunk[1]")
        pieces[0].address = int(ffi.cast("uintptr_t", self.data()))
        pieces[0].offset = chunks[0].offset = self.pool.geometry.data_offset
        pieces[0].length = chunks[0].length = 4096
        self.keep += [pieces, chunks]
        counts = {"piece_count": 1, "chunk_count": 1}
        return ffi.new("bl_plan *", {"pieces": pieces, "chunks": chunks, **counts})


Call = Callable[[], object]
Ready = Callable[[Scene], Call]


def _session(make: Callable[[Scene, Any], Call]) -> Ready:
    """Call the function with an attached session."""

    def ready(scene: Scene) -> Call:
        scene.keep.append(IndexServer(scene.pool))
        scene.keep[-1].start()
        scene.client = Client(scene.pool)
        return make(scene, scene.client.session)

    return ready


def _stored(make: Callable[[Scene, Any], Call]) -> Ready:
    """Make the same call after its block was stored."""

    def store(scene: Scene, session: Any) -> Call:
        outputs = ffi.new("uint8_t[1]"), ffi.new("int32_t[1]")
        assert lib.bl_kv_put(session, scene.batch(), *outputs) == 0
        return make(scene, session)

    return _session(store)


def _server(make: Callable[[Scene, Any], Call], *, serving: bool = False) -> Ready:
    """Call a function of a server; with ``serving``, it has taken the pool over."""

    def ready(scene: Scene) -> Call:
        out = ffi.new("bl_server **")
        directory = os.fsencode(scene.pool.runtime_dir)
        assert lib.bl_server_create(scene.pool.handle, directory, 0, out) == 0
        if serving:
            assert lib.bl_server_serve_lanes(out[0]) == 0
        return make(scene, out[0])

    return ready


def _index(make: Callable[[Scene, Any], Call]) -> Ready:
    def with_meta(scene: Scene, server: Any) -> Call:
        out = ffi.new("bl_index **")
        assert lib.bl_index_create(server, lib.BL_EVICT_LRU, out) == 0
        return make(scene, out[0])

    return _server(with_meta)


def _pool(make: Callable[[Scene, Any], Call]) -> Ready:
    return lambda scene: make(scene, scene.pool.handle)


def _acceptance(make: Callable[[Scene, Any], Call]) -> Ready:
    def ready(scene: Scene) -> Call:
        config = ffi.new("bl_acceptance_config *", {"patience_ns": TIMEOUT_NS, "tests": 1})
        out = ffi.new("bl_acceptance **")
        assert lib.bl_acceptance_create(scene.pool.handle, config, out) == 0
        return make(scene, out[0])

    return ready


def _dsa(make: Callable[[Scene, Any], Call]) -> Ready:
    def ready(scene: Scene) -> Call:
        limits = ffi.new("bl_dsa_limits *", [1 << 20, 32, 64, 0, 0])
        queue = soft_queue(limits, pool=scene.pool.handle)
        engine = ffi.new("bl_dsa_engine **")
        rules = ffi.new("bl_dsa_rules *", [lib.BL_DSA_FLUSH_CPU, lib.BL_DSA_FLUSH_CPU, 0, 0])
        assert lib.bl_dsa_engine_open(scene.pool.handle, queue, limits, rules, engine) == 0
        return make(scene, engine[0])

    return ready


def _dsa_copy(is_read: int) -> Ready:
    def make(scene: Scene, engine: Any) -> Call:
        plan = scene.plan()

        def copy() -> int:
            out = ffi.new("bl_dsa_transfer **")
            status = lib.bl_dsa_start(engine, plan, is_read, out)
            if status < 0:
                return int(status)
            assert lib.bl_dsa_wait(engine, out[0], TIMEOUT_NS) == 0
            lib.bl_dsa_poll(engine)
            return int(lib.bl_dsa_status(out[0]))

        return copy

    return _dsa(make)


def _finding(scene: Scene, pool: Any) -> Call:
    finding = ffi.new("bl_finding *", {"kind": lib.BL_FINDING_ENTRY_DAMAGED})
    return lambda: lib.bl_repair_finding(pool, finding)


def _opened(scene: Scene) -> Call:
    members = scene.pool._mapping
    out, count = ffi.new("bl_pool **"), len(members.addresses)

    def open_and_close() -> int:
        status = lib.bl_pool_open(members.superblocks, members.addresses, out)
        lib.bl_pool_back(out[0], _a("int32_t[]", [-1] * count), _a("uint64_t[]", count))
        lib.bl_pool_close(out[0])
        return int(status)

    return open_and_close


def _opening(scene: Scene) -> Call:
    scene.keep.append(IndexServer(scene.pool))
    scene.keep[-1].start()
    out = ffi.new("bl_session **")
    directory = os.fsencode(scene.pool.runtime_dir)
    pool = scene.pool.handle
    return lambda: lib.bl_session_open(pool, directory, 0, TIMEOUT_NS, out)


def _no_word(call: Callable[[Any], object]) -> Callable[[Scene, Any], Call]:
    return lambda scene, thing: lambda: call(thing)


def _a(kind: str, *values: Any) -> Any:
    return ffi.new(kind, *values)


def _pump(scene: Scene, session: Any) -> Call:
    requests = scene.data()
    pump = _a("bl_pump *", {"requests": requests, "count": 8, "size": 8, "depth": 4})
    return lambda: lib.bl_session_pump(session, pump, TIMEOUT_NS)


def _message(scene: Scene, session: Any) -> Call:
    size = _a("uint32_t *")
    message = _a("bl_message *", {"reply": scene.data(), "reply_capacity": 64, "reply_size": size})
    return lambda: lib.bl_session_call(session, message, TIMEOUT_NS)


T = TIMEOUT_NS
WHAT: dict[str, Any] = {"length": 4096}


def _keyed(call: Callable[[Any, Any], int]) -> Ready:
    def make(scene: Scene, session: Any) -> Call:
        key = _a("uint64_t[2]", [1, 2])
        return lambda: call(session, key)

    return _session(make)


def _committed(call: Callable[[Any, Any], int]) -> Ready:
    def make(scene: Scene, session: Any) -> Call:
        commit = _a("bl_commit[1]")
        return lambda: call(session, commit)

    return _session(make)


def _batched(call: Callable[[Any, Any], int]) -> Callable[[Scene, Any], Call]:
    def make(scene: Scene, session: Any) -> Call:
        batch = scene.batch()
        return lambda: call(session, batch)

    return make


def _planned(call: Callable[[Any, Any], int]) -> Ready:
    def make(scene: Scene, pool: Any) -> Call:
        plan = scene.plan()
        return lambda: call(pool, plan)

    return _pool(make)


AT = 6 << 20  # in the data of every pool here

# These functions must report that a device failed.
FAULTS: dict[str, Ready] = {
    "bl_pool_format": _pool(
        lambda scene, pool: lambda: lib.bl_pool_format(pool, scene.pool._mapping.superblocks, 0)
    ),
    "bl_pool_write": _pool(lambda s, pool: lambda: lib.bl_pool_write(pool, AT, s.data(), 4096)),
    "bl_pool_read": _pool(lambda s, pool: lambda: lib.bl_pool_read(pool, AT, s.data(), 4096)),
    "bl_plan_maintenance": _planned(
        lambda p, plan: lib.bl_plan_maintenance(p, plan, lib.BL_MAINTENANCE_INVALIDATE, 2)
    ),
    "bl_plan_write": _planned(lambda p, plan: lib.bl_plan_write(p, plan, ffi.NULL, ffi.NULL, 0)),
    "bl_plan_read": _planned(lambda p, plan: lib.bl_plan_read(p, plan, ffi.NULL, ffi.NULL, 0)),
    "bl_check_pool": _pool(
        lambda s, pool: (
            lambda: lib.bl_check_pool(
                pool, 1, _a("bl_finding[8]"), 8, _a("bl_check_report *"), ffi.NULL, 0
            )
        )
    ),
    "bl_names_read": _pool(
        lambda s, pool: lambda: lib.bl_names_read(pool, 0, _a("uint32_t *"), 1, _a("bl_change[1]"))
    ),
    "bl_entries_read": _pool(
        lambda s, pool: lambda: lib.bl_entries_read(pool, 0, 0, 1, _a("bl_entry[1]"))
    ),
    "bl_repair_finding": _pool(_finding),
    "bl_acceptance_create": _pool(
        lambda s, pool: (
            lambda: lib.bl_acceptance_create(
                pool, _a("bl_acceptance_config *", {"patience_ns": T}), _a("bl_acceptance **")
            )
        )
    ),
    "bl_acceptance_run": _acceptance(_no_word(lib.bl_acceptance_run)),
    "bl_server_serve_lanes": _server(_no_word(lib.bl_server_serve_lanes)),
    "bl_server_declare_gone": _server(_no_word(lib.bl_server_declare_gone)),
    "bl_server_watch": _server(_no_word(lambda server: lib.bl_server_watch(server, T, T))),
    "bl_server_run": _server(_no_word(lib.bl_server_run), serving=True),
    "bl_index_serve": _index(_no_word(lib.bl_index_serve)),
    "bl_session_open": _opening,
    "bl_session_call": _session(_message),
    "bl_session_call_bytes": _session(
        _no_word(lambda s: lib.bl_session_call_bytes(s, 0, b"", 0, _a("uint8_t[64]"), 64, T))
    ),
    "bl_session_pump": _session(_pump),
    "bl_lookup": _keyed(
        lambda s, key: lib.bl_lookup(s, key, 1, 0, _a("bl_block_record[1]"), _a("uint32_t *"), T)
    ),
    "bl_reserve": _keyed(
        lambda s, key: lib.bl_reserve(
            s, key, 1, _a("bl_block_request *", WHAT), _a("bl_block_record[1]"), T
        )
    ),
    "bl_commit_blocks": _committed(lambda s, c: lib.bl_commit_blocks(s, c, 1, _a("int32_t[1]"), T)),
    "bl_abort_blocks": _committed(lambda s, c: lib.bl_abort_blocks(s, c, 1, T)),
    "bl_release_blocks": _session(
        _no_word(lambda s: lib.bl_release_blocks(s, _a("bl_block_record[1]"), 1, T))
    ),
    "bl_remove_blocks": _keyed(lambda s, key: lib.bl_remove_blocks(s, key, 1, T)),
    "bl_index_get_stat": _session(
        _no_word(lambda s: lib.bl_index_get_stat(s, _a("bl_index_stat *"), T))
    ),
    "bl_task_claim": _session(_no_word(lambda s: lib.bl_task_claim(s, 1, 1, _a("bl_task *"), T))),
    "bl_task_extend": _session(_no_word(lambda s: lib.bl_task_extend(s, _a("bl_task *"), 1, T))),
    "bl_task_count": _session(
        _no_word(lambda s: lib.bl_task_count(s, 1, _a("bl_task_counts *"), T))
    ),
    "bl_task_withdraw": _keyed(lambda s, key: lib.bl_task_withdraw(s, key, T)),
    "bl_onboard": _keyed(lambda s, key: lib.bl_onboard(s, key, 1, 1, T)),
    "bl_hint_blocks": _keyed(
        lambda s, key: lib.bl_hint_blocks(s, key, 1, 0, 0, _a("uint32_t *"), T)
    ),
    "bl_removing": _keyed(lambda s, key: lib.bl_removing(s, key, 1, _a("uint8_t[1]"), T)),
    "bl_tiers": _keyed(lambda s, key: lib.bl_tiers(s, key, 1, _a("uint8_t[1]"), T)),
    "bl_lower_take": _session(
        _no_word(lambda s: lib.bl_lower_take(s, 1, 0, 0, _a("bl_lower_record[1]"), 1, T))
    ),
    "bl_lower_report": _session(
        _no_word(lambda s: lib.bl_lower_report(s, 1, _a("bl_lower_note[1]"), 1, T))
    ),
    "bl_kv_put": _session(
        _batched(lambda s, batch: lib.bl_kv_put(s, batch, _a("uint8_t[1]"), _a("int32_t[1]")))
    ),
    "bl_kv_get": _stored(
        _batched(lambda s, batch: lib.bl_kv_get(s, batch, _a("uint8_t[1]"), _a("uint64_t *")))
    ),
    "bl_dsa_write_one": _dsa(lambda s, e: lambda: lib.bl_dsa_write_one(e, AT, s.data(), 4096)),
    "bl_dsa_read_one": _dsa(lambda s, e: lambda: lib.bl_dsa_read_one(e, AT, s.data(), 4096)),
    "bl_dsa_start": _dsa_copy(0),
    "bl_dsa_wait": _dsa_copy(1),
    "bl_dsa_poll": _dsa_copy(1),
}

# These functions need no byte of the pool, or must end without it: they return nothing, or 0.
SURVIVES: dict[str, Ready] = {
    "bl_pool_open": _opened,
    "bl_pool_close": _opened,
    "bl_pool_back": _opened,
    "bl_pool_reserve": _pool(_no_word(lib.bl_pool_reserve)),
    "bl_pool_prefault": _pool(_no_word(lambda pool: lib.bl_pool_prefault(pool, 0, 2 * SIZE))),
    "bl_pool_device": _pool(_no_word(lambda pool: lib.bl_pool_device(pool, 0) and None)),
    "bl_pool_address": _pool(_no_word(lambda pool: lib.bl_pool_address(pool, AT) and None)),
    "bl_plan_check": _planned(lib.bl_plan_check),
    "bl_acceptance_destroy": _acceptance(_no_word(lib.bl_acceptance_destroy)),
    "bl_acceptance_stop": _acceptance(_no_word(lib.bl_acceptance_stop)),
    "bl_acceptance_cells": _acceptance(
        _no_word(lambda a: lib.bl_acceptance_cells(a, _a("bl_acceptance_cell **")) and None)
    ),
    "bl_server_create": _server(_no_word(lambda server: None)),
    "bl_server_destroy": _server(_no_word(lib.bl_server_destroy), serving=True),
    "bl_server_heartbeat_lost": _server(
        _no_word(lambda server: lib.bl_server_heartbeat_lost(server, 1))
    ),
    "bl_server_limit": _server(
        _no_word(lambda server: lib.bl_server_limit(server, _a("bl_quota *")))
    ),
    "bl_server_forked": _server(_no_word(lib.bl_server_forked)),
    "bl_server_handle_method": _server(
        _no_word(lambda s: lib.bl_server_handle_method(s, 64, lib.bl_echo_handler, ffi.NULL))
    ),
    "bl_function_open": _server(_no_word(lib.bl_function_open)),
    "bl_server_stop": _server(_no_word(lib.bl_server_stop), serving=True),
    "bl_server_describe": _server(
        _no_word(lambda s: lib.bl_server_describe(s, _a("bl_server_stat *"))), serving=True
    ),
    "bl_server_drain": _server(_no_word(lambda server: lib.bl_server_drain(server, 1))),
    "bl_server_calls": _server(
        _no_word(lambda s: lib.bl_server_calls(s, _a("bl_calls[1]"), 1)), serving=True
    ),
    "bl_server_reported": _server(
        _no_word(lambda s: lib.bl_server_reported(s, 0, _a("uint64_t[]", lib.BL_REPORT_FIGURES))),
        serving=True,
    ),
    "bl_index_map": _index(_no_word(lambda m: lib.bl_index_map(m, 1, _a("bl_map_cell[64]")))),
    "bl_index_tenants": _index(_no_word(lambda m: lib.bl_index_tenants(m, _a("bl_tenant[1]"), 1))),
    "bl_index_share": _index(
        _no_word(
            lambda m: lib.bl_index_share(
                m, ffi.new("uint32_t[]", [1]), 1, _a("bl_share_rule[1]", [(0, 0, 1, 0)]), 1
            )
        )
    ),
    "bl_index_shares": _index(
        _no_word(lambda m: lib.bl_index_shares(m, _a("bl_share_view[32]"), 32) - 1)
    ),
    "bl_index_hints": _index(_no_word(lambda m: lib.bl_index_hints(m, _a("bl_hint_stat *")))),
    "bl_index_hint_part": _index(_no_word(lambda m: lib.bl_index_hint_part(m, 1))),
    "bl_index_refused": _index(_no_word(lambda m: lib.bl_index_refused(m, 1))),
    "bl_index_create": _index(_no_word(lambda index: None)),
    "bl_index_destroy": _index(_no_word(lib.bl_index_destroy)),
    "bl_lower_attach": _index(_no_word(lambda m: lib.bl_lower_attach(m, 1, False, 0, 1))),
    "bl_journal_attach": _index(_no_word(lambda m: lib.bl_journal_attach(m, 1))),
    "bl_journal_take": _index(
        _no_word(lambda m: lib.bl_journal_take(m, _a("bl_change[1]"), 1, _a("uint64_t *")))
    ),
    "bl_lower_name_tiers": _index(
        _no_word(lambda m: lib.bl_lower_name_tiers(m, _a("uint64_t[8]")))
    ),
    "bl_lower_give_up": _index(_no_word(lambda m: lib.bl_lower_give_up(m, 1))),
    "bl_lower_reported": _index(_no_word(lib.bl_lower_reported)),
    "bl_lower_wait": _index(_no_word(lambda m: lib.bl_lower_wait(m, 1, 0))),
    "bl_lower_describe": _index(
        _no_word(lambda m: lib.bl_lower_describe(m, _a("bl_lower_stat *")))
    ),
    "bl_index_sessions": _index(
        _no_word(lambda m: lib.bl_index_sessions(m, 0, _a("bl_session_view[1]"), 1))
    ),
    "bl_index_describe": _index(
        _no_word(lambda m: lib.bl_index_describe(m, _a("bl_index_stat *")))
    ),
    "bl_session_end": _session(lambda scene, session: scene.client.close),
    "bl_session_describe": _session(
        _no_word(lambda s: lib.bl_session_describe(s, _a("bl_session_stat *")))
    ),
    "bl_dsa_engine_open": _dsa(_no_word(lambda engine: None)),
    "bl_dsa_engine_close": _dsa(_no_word(lib.bl_dsa_engine_close)),
    "bl_dsa_engine_stat": _dsa(_no_word(lambda e: lib.bl_dsa_engine_stat(e, _a("bl_dsa_stat *")))),
}

# These functions use only this process's own memory, and need other arguments than a pool.
APART = {
    *("bl_io_queue_create", "bl_session_forked", "bl_session_free"),
    *("bl_function_take", "bl_function_answer", "bl_cuda_engine_open"),
}


def main(directory: Path) -> None:
    """Call each of them over a pool of its own."""
    for number, (name, ready) in enumerate((FAULTS | SURVIVES).items()):
        paths = [directory / f"{number}-{device}" for device in "ab"]
        pool = Pool.create(
            paths,
            device_size=SIZE,
            coherence="software",
            sparse=True,
            max_blocks=64,
            lane_count=4,
        )
        scene = Scene(pool, paths)
        call = ready(scene)
        scene.cut()
        print(json.dumps({"calls": name}), flush=True)
        print(json.dumps({"name": name, "status": call()}), flush=True)
        for server in scene.keep:
            if isinstance(server, IndexServer):
                server.stop()
    os._exit(0)  # unfinished work does not matter here


if __name__ == "__main__":
    main(Path(sys.argv[1]))
