# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Which connection loses its slot, on a virtual clock; the rules for names and paths; tokens and
certificates. The table of docs/operate/listeners.md: for each defense and each listener the
behavior and its test, or the reason why the listener needs no such defense.
"""

from __future__ import annotations

import ast
import re
import ssl
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from beluga import http_server
from beluga.errors import SettingsError
from beluga.http_server import ConnectionSlots, Share
from beluga.listening import (
    KnownHosts,
    Token,
    from_other_site,
    is_loopback,
    plain_path,
    read_tls,
    read_token,
)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(http_server.time, "monotonic", lambda: self.now)
        self.slots: ConnectionSlots[str] = ConnectionSlots(30.0, lambda: self.now)

    def slowest(self, count: int = 1, lag_min_s: float = 0.0) -> list[str]:
        return [slot.connection for slot in self.slots.slowest(count, lag_min_s)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_client_that_was_silent_longest_loses_its_slot(clock: Clock) -> None:
    for name in ("old", "middle", "new"):
        clock.slots.take(name, "a")
        clock.now += 2
    assert clock.slowest(2) == ["old", "middle"]


def test_a_client_with_a_running_request_keeps_its_connection(clock: Clock) -> None:
    slot = clock.slots.take("one", "a")
    slot.work()
    clock.now += 1000
    assert clock.slowest() == []
    assert clock.slots.overdue() == []
    slot.wait()
    clock.now += 31
    assert [slot.connection for slot in clock.slots.overdue()] == ["one"]


def test_a_trickle_of_bytes_counts_as_silence(clock: Clock) -> None:
    slot = clock.slots.take("drips", "a")
    for _ in range(31):
        clock.now += 1
        slot.move(1)
    assert [slot.connection for slot in clock.slots.overdue()] == ["drips"]


def test_earlier_speed_protects_a_client_only_briefly(clock: Clock) -> None:
    """It sent a mebibyte at once, and then nothing."""
    slot = clock.slots.take("one", "a")
    slot.move(1 << 20)
    clock.now += 31
    assert clock.slots.overdue()


def test_an_active_client_keeps_its_slot(clock: Clock) -> None:
    fast, slow = clock.slots.take("fast", "a"), clock.slots.take("slow", "b")
    for _ in range(100):
        clock.now += 1
        fast.move(100_000)
        slow.move(10)
    assert clock.slowest(2, 0.25) == ["slow"]


def test_only_the_peer_with_the_most_connections_loses_those_that_it_uses() -> None:
    share: Any = Share(connections_max=5, requests_max=3)
    for connection, peer in (("1", "a"), ("2", "b"), ("3", "b")):
        share.slots.take(connection, peer)
    assert not share.is_crowded_by("b")
    share.slots.take("4", "b")
    assert share.is_crowded_by("b")
    assert not share.is_crowded_by("a")


def test_the_peer_with_the_most_slow_clients_loses_slots_first(clock: Clock) -> None:
    clock.slots.take("probe", "kubelet")
    clock.now += 1
    for number in range(5):
        clock.slots.take(f"flood{number}", "attacker")
    clock.now += 2
    assert clock.slowest() == ["flood0"]
    clock.slots.leave("flood0")
    assert clock.slowest() == ["flood1"]


def test_a_new_client_is_kept_while_others_stall(clock: Clock) -> None:
    clock.slots.take("lags", "b")
    clock.now += 2
    for number in range(9):
        clock.slots.take(str(number), "a")
    assert clock.slowest() == ["lags"]
    assert clock.slowest(9, 0.25) == ["lags"]


@pytest.mark.parametrize(
    ("host", "recognized"),
    [
        *[(name, True) for name in ("127.0.0.1:80", "[::1]:9", "[::1]", "localhost", "LOCALHOST.")],
        *[(name, True) for name in ("a.localhost", "pool.example", "POOL.example:1", "10.0.0.1")],
        *[
            (name, False)
            for name in ("evil.example", "localhost.evil.example", "", ":80", "gateway")
        ],
        *[(name, False) for name in ("1.2.3.4.evil.example", "1.2.3", "evil.example:")],
    ],
)
def test_names_of_this_machine_are_recognized(host: str, recognized: bool) -> None:
    assert (host in KnownHosts("127.0.0.1", ["pool.example"])) is recognized


def test_all_host_names_are_accepted_if_configured() -> None:
    assert "evil.example" in KnownHosts("127.0.0.1", ["*"])
    assert "gateway:80" in KnownHosts("127.0.0.1", single_labels=True)
    assert "my_gateway-1" in KnownHosts("127.0.0.1", single_labels=True)
    for host in ("ai.", "ai.:80", "a@b", "a:b", "a b", "", "\N{CYRILLIC SMALL LETTER O}", "a" * 64):
        assert host not in KnownHosts("127.0.0.1", single_labels=True)
    assert "localhost." in KnownHosts("127.0.0.1", single_labels=True)
    assert "127.0.0.1." in KnownHosts("127.0.0.1")
    assert "evil.example" not in KnownHosts("127.0.0.1", single_labels=True)


@pytest.mark.parametrize(
    ("headers", "other"),
    [
        ({"Host": "a:1"}, False),
        ({"Host": "a:1", "Origin": "http://a:1"}, False),
        ({"Host": "a:1", "Origin": "http://a:2"}, True),
        ({"Host": "a:1", "Origin": "null"}, True),
        ({"Host": "a:1", "Origin": "http://["}, True),
        ({"Host": "a:1", "Origin": ""}, True),
        ({"Host": "a:1", "Sec-Fetch-Site": "cross-site"}, True),
        ({"Host": "a:1", "Sec-Fetch-Site": "same-origin"}, False),
        ({"Host": "a:1", "Sec-Fetch-Site": "none"}, False),
        ({"Host": "a:1", "Origin": "https://chat.example"}, False),
    ],
)
def test_requests_of_other_origins_are_recognized(headers: dict[str, str], other: bool) -> None:
    assert from_other_site(headers, ["https://chat.example"]) is other


def test_loopback_addresses_are_recognized() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    others = ("0.0.0.0", "::", "10.0.0.1", "host.example", "")  # noqa: S104
    assert not any(map(is_loopback, others))


@pytest.mark.parametrize(
    ("raw", "plain"),
    [
        ("/", "/"),
        ("/v1/x", "/v1/x"),
        ("/v1/x/", "/v1/x"),
        ("/v1/%78", "/v1/x"),
        ("/v1/a.b:c", "/v1/a.b:c"),
        *[
            (raw, None)
            for raw in ("", "v1", "//v1", "/v1//", "/v1/.", "/v1/..", "/./v1", "/v1/..;/x")
        ],
        *[
            (raw, None)
            for raw in ("/v1%2fx", "/v1/%252e", "/v1/%00", "/v1/a\\b", "/v1/%5c", "/%0a")
        ],
    ],
)
def test_a_path_has_one_spelling(raw: str, plain: str | None) -> None:
    assert plain_path(raw) == plain


SECRET = "no-one-may-read-this"  # noqa: S105  it is none


def made(folder: Path, *secret: str) -> str:
    """Return the setting of a new certificate."""
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2"),
            *("-keyout", folder / "key", "-out", folder / "cert", "-subj", "/CN=localhost"),
            *(secret or ("-nodes",)),
        ],
        capture_output=True,
        check=True,
    )
    return f"{folder / 'cert'},{folder / 'key'}"


def test_a_token_is_not_in_its_repr() -> None:
    assert SECRET not in f"{Token(SECRET)!r} {Token(SECRET)} {[Token(SECRET)]}"


def test_a_guessable_token_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("x" * 15 + "\n")
    with pytest.raises(SettingsError, match="has 15 characters; make one of at least 16"):
        read_token(file)
    file.write_text("x" * 16 + "\n")
    assert read_token(file).shown_by("Bearer " + "x" * 16)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "utf-8"])
def test_a_token_is_read_after_a_byte_order_mark(tmp_path: Path, encoding: str) -> None:
    """Editors of Windows put one in front, which no client sends."""
    file = tmp_path / "token"
    file.write_bytes(f"{SECRET}\r\nmore\r\n".encode(encoding))
    assert read_token(file).shown_by(f"Bearer {SECRET}")


def test_insecure_tls_versions_are_disabled(tmp_path: Path) -> None:
    assert read_tls(made(tmp_path)).minimum_version == ssl.TLSVersion.TLSv1_2


def test_an_encrypted_key_is_rejected_without_a_prompt(tmp_path: Path) -> None:
    setting = made(tmp_path, "-passout", f"pass:{SECRET}")
    with pytest.raises(SettingsError, match="the key is encrypted"):
        read_tls(setting)


# ---- The table of the page

LISTENERS = ("clients", "operators", "admin port", "local socket", "events", "prefill queue")


class Cell(NamedTuple):
    """A statement of the table, and its test (``file::function``), or "" for a reason."""

    text: str
    test: str = ""


_ATTACKS, _CALLERS = "test_attacks.py", "test_callers.py"
_QUEUE = "test_prefill_queue.py"
_SOCKETS = "../events/test_event_service.py"
_CONNECTS = Cell("listens nowhere")
_OWN = Cell("no browser reaches it")
_ZMQ = Cell("speaks no HTTP")


def _http(text: str, test: str, *others: Cell) -> tuple[Cell, ...]:
    """Return a row that is the same for all listeners of HTTP."""
    return (*[Cell(text, test)] * 4, *others)


TABLE: dict[str, tuple[Cell, ...]] = {
    "silent clients": _http(
        "the slowest connection is closed",
        f"{_ATTACKS}::test_stalled_clients_do_not_block_others",
        Cell(
            "closed after 5 s without a handshake, 30 s without a heartbeat",
            f"{_SOCKETS}::test_a_silent_handshake_ends",
        ),
        _CONNECTS,
    ),
    "a byte now and then": _http(
        "counts as silent",
        f"{_ATTACKS}::test_slow_clients_do_not_block_others",
        Cell("counts as silent", f"{_SOCKETS}::test_a_silent_handshake_ends"),
        _CONNECTS,
    ),
    "half-sent bodies": (
        Cell("count as silent", f"{_ATTACKS}::test_incomplete_bodies_do_not_block_requests"),
        *[Cell("count as silent", f"{_ATTACKS}::test_stalled_clients_do_not_block_others")] * 3,
        Cell(
            "frames of 1 KiB, with token ids 64 KiB",
            f"{_ATTACKS}::test_a_router_that_sends_too_much_is_disconnected",
        ),
        _CONNECTS,
    ),
    "clients that do not read": _http(
        "the slowest connection is closed",
        f"{_ATTACKS}::test_clients_that_do_not_read_do_not_block_others",
        Cell(
            "a replay ends after 10 s; at most 1,000 messages wait",
            f"{_SOCKETS}::test_a_subscriber_that_does_not_read_has_a_bounded_queue",
        ),
        _CONNECTS,
    ),
    "bodies": (
        Cell(
            "`--max-body` 64 MiB each, `--max-bodies` 256 MiB all: 413, 503",
            f"{_ATTACKS}::test_the_sum_of_bodies_is_bounded",
        ),
        Cell("64 KiB: 413", f"{_ATTACKS}::test_a_body_that_is_too_large_is_refused"),
        Cell("none: 413 or 403", f"{_ATTACKS}::test_a_body_that_is_too_large_is_refused"),
        Cell("64 KiB: 413", f"{_ATTACKS}::test_a_body_of_the_server_has_64_kib_at_most"),
        Cell("frames of 1 KiB, with token ids 64 KiB; not their number (see below)"),
        Cell(
            "1 MiB and 1,024 tasks",
            "../disagg/test_queue.py::test_a_wrong_or_too_large_task_is_refused",
        ),
    ),
    "headers": (
        *[Cell("64 KiB each, 1 MiB of a head, 64 MiB all", f"{_ATTACKS}::test_heads_are_bounded")]
        * 4,
        _ZMQ,
        _CONNECTS,
    ),
    "Host": (
        *[
            Cell(
                "a foreign name: 421",
                f"{_CALLERS}::test_a_foreign_host_name_is_rejected",
            )
        ]
        * 3,
        _OWN,
        _ZMQ,
        _CONNECTS,
    ),
    "other sites": (
        Cell(
            "forms and empty requests without a key: 403",
            f"{_CALLERS}::test_a_page_of_another_site_sends_no_form_without_a_key",
        ),
        Cell("403", f"{_CALLERS}::test_a_page_of_another_site_changes_nothing"),
        Cell("changes nothing: 403", f"{_CALLERS}::test_a_page_of_another_site_changes_nothing"),
        _OWN,
        _ZMQ,
        _CONNECTS,
    ),
    "content types": (
        *[Cell("text and forms: 415", f"{_CALLERS}::test_forms_are_not_parsed_as_json")] * 2,
        Cell("takes no body"),
        _OWN,
        _ZMQ,
        Cell(
            "typed MessagePack, never pickled",
            "../disagg/test_queue.py::test_invalid_bytes_are_rejected_as_a_task",
        ),
    ),
    "spellings of a path": (
        Cell(
            "one: 400, 404",
            f"{_CALLERS}::test_no_spelling_of_a_path_reaches_operator_routes",
        ),
        Cell("one: 404", f"{_CALLERS}::test_operator_routes_have_one_spelling"),
        *[Cell("one: 400, 404", f"{_CALLERS}::test_the_server_has_one_spelling_of_a_path")] * 2,
        _ZMQ,
        Cell("two paths of engines", f"{_QUEUE}::test_a_task_reaches_no_other_path_of_an_engine"),
    ),
    "secrets": (
        Cell(
            "no engine's address in headers",
            f"{_CALLERS}::test_no_response_shows_an_engine_address",
        ),
        *[Cell("shown nowhere", f"{_CALLERS}::test_a_token_is_required_and_never_printed")] * 2,
        Cell("has none"),
        Cell("shown nowhere", f"{_SOCKETS}::test_routers_need_the_token"),
        Cell("no error shows a password", f"{_QUEUE}::test_no_error_shows_a_queues_password"),
    ),
    "other machines": (
        Cell("TLS; engines check keys", f"{_CALLERS}::test_both_servers_support_tls"),
        Cell(
            "a token is needed; TLS",
            f"{_CALLERS}::test_operators_on_other_machines_need_a_token",
        ),
        Cell(
            "token and TLS if given; reads only",
            f"{_CALLERS}::test_a_token_is_required_and_never_printed",
        ),
        Cell("cannot reach it"),
        Cell("a token if given, without TLS", f"{_SOCKETS}::test_routers_need_the_token"),
        Cell(
            "password and TLS of NATS",
            f"{_QUEUE}::test_a_server_without_tls_does_not_get_the_password_of_a_tls_queue",
        ),
    ),
    "floods": _http(
        "health is answered",
        f"{_ATTACKS}::test_health_is_answered_during_a_flood_of_requests",
        Cell("delay no event", f"{_ATTACKS}::test_a_flood_of_replays_delays_no_event"),
        Cell("1,024 tasks", "../disagg/test_queue.py::test_a_full_queue_raises_a_clear_error"),
    ),
}


def page_table() -> str:
    """Return the table as it stands in docs/operate/listeners.md."""
    rows = [("", *LISTENERS), ("---",) * (1 + len(LISTENERS))]
    rows += [(name, *(cell.text for cell in cells)) for name, cells in TABLE.items()]
    return "".join(f"| {' | '.join(row)} |\n".replace("|  |", "| |") for row in rows)


FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs/operate/listeners.md"


def test_the_page_has_the_table() -> None:
    assert page_table() in PAGE.read_text()


def test_every_cell_has_a_test_that_exists_or_a_reason() -> None:
    for cells in TABLE.values():
        assert len(cells) == len(LISTENERS)
        for cell in cells:
            assert cell.text
            if cell.test:
                file, _, name = cell.test.partition("::")
                tree = ast.parse((FOLDER / file).read_text())
                names = {node.name for node in ast.walk(tree) if isinstance(node, FUNCTIONS)}
                assert name in names, cell.test


def test_every_test_of_an_attack_is_in_the_table() -> None:
    named = {cell.test for cells in TABLE.values() for cell in cells}
    for node in ast.parse((FOLDER / _ATTACKS).read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            assert f"{_ATTACKS}::{node.name}" in named


# By row of the page's table of bounds: the file and the test of what happens at the bound.
BOUNDS = {
    "open connections for clients": (
        "listeners/test_rules.py",
        "test_the_peer_with_the_most_slow_clients_loses_slots_first",
    ),
    "unfinished heads": (
        "gateway/test_limits.py",
        "test_all_unfinished_heads_together_are_bounded",
    ),
    "bodies": (
        "listeners/test_attacks.py",
        "test_the_sum_of_bodies_is_bounded",
    ),
    "waiting requests": (
        "gateway/test_director.py",
        "test_no_client_fills_the_queue_alone",
    ),
    "engines of the last responses": (
        "gateway/test_director.py",
        "test_the_last_responses_are_stored",
    ),
    "clients that an engine refused": (
        "gateway/test_engine_failures.py",
        "test_the_table_of_clients_is_bounded",
    ),
    "salted blocks of an engine": (
        "router/test_kv_wire.py",
        "test_blocks_are_salted_from_the_first_on",
    ),
    "kinds of logged messages": (
        "test_surroundings.py",
        "test_message_kinds_from_outside_take_bounded_memory",
    ),
    "incomplete messages": (
        "rpc/test_handlers.py",
        "test_no_session_takes_all_space_for_messages",
    ),
    "pinned blocks": (
        "index/test_operate.py",
        "test_pins_beyond_the_quota_are_refused_until_some_are_released",
    ),
    "hints": (
        "index/test_shares.py",
        "test_a_session_gives_a_bounded_number_of_hints",
    ),
    "requested blocks of lower tiers": (
        "index/test_tasks.py",
        "test_no_session_takes_all_requests",
    ),
    "removals that tiers have not executed": (
        "tiers/test_removals.py",
        "test_removals_beyond_the_bound_are_rejected_and_none_is_lost",
    ),
    "tasks in a pool's queues": (
        "index/test_tasks.py",
        "test_tasks_cannot_fill_the_pool",
    ),
    "tasks in a prefill queue": (
        "disagg/test_queue.py",
        "test_a_full_queue_raises_a_clear_error",
    ),
    "events that a replay can repeat": (
        "router/test_indexer.py",
        "test_a_buffer_replays_its_items",
    ),
    "token ids of blocks": (
        "events/test_forms.py",
        "test_tokens_take_bounded_memory_and_the_oldest_are_dropped",
    ),
    "events that a router has not read": (
        "events/test_event_service.py",
        "test_a_subscriber_that_does_not_read_has_a_bounded_queue",
    ),
    "replays": (
        "events/test_event_service.py",
        "test_routers_that_do_not_read_lose_their_replays",
    ),
    "caches of a connector's session": (
        "connectors/test_connection.py",
        "test_salts_that_clients_choose_grow_neither_memory_nor_files",
    ),
    "namespaces of LMCache's adapter": (
        "connectors/test_lmcache.py",
        "test_salts_leave_a_bounded_number_of_namespaces",
    ),
    "files of namespaces": (
        "connectors/test_connection.py",
        "test_salts_that_clients_choose_grow_neither_memory_nor_files",
    ),
    "sessions with hints, in vLLM's connector": (
        "connectors/vllm/test_request_hints.py",
        "test_sessions_are_bounded",
    ),
    "blocks being saved, in vLLM's connector": (
        "connectors/vllm/test_schedule.py",
        "test_the_oldest_announcements_are_dropped_when_too_many_are_pending",
    ),
    "token ids that the server has not read, in vLLM's connector": (
        "connectors/vllm/test_connector.py",
        "test_a_server_that_reads_no_token_ids_delays_no_request",
    ),
    "adapters, in vLLM's connector": (
        "connectors/vllm/test_updates.py",
        "test_the_number_of_tracked_adapters_is_bounded",
    ),
    "hints that wait, in vLLM's connector": (
        "connectors/vllm/test_request_hints.py",
        "test_hints_that_a_full_queue_or_a_lost_server_drops_are_counted",
    ),
    "deletions that LMCache's adapter has not executed": (
        "connectors/test_lmcache.py",
        "test_beyond_the_bound_a_whole_model_is_dropped",
    ),
    "calls of a disk or store that hang": (
        "tiers/test_disk_faults.py",
        "test_threads_that_hang_are_bounded",
    ),
}


def test_every_bound_has_its_value_and_a_test() -> None:
    text = PAGE.read_text().partition("## Bounds")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[2:]] == list(BOUNDS)
    for what, *_, constant in rows[2:]:
        match = re.fullmatch(r"`(\w+) = (.+)` in `(.+)`", constant)
        assert match, what
        name, value, file = match.groups()
        source = (FOLDER.parents[1] / file).read_text()
        typed = rf"\b{name}(?:: \w+)? = {re.escape(value)}(?=[\s,])"
        assert re.search(typed, source), f"{what}: {constant}"
        test_file, test = BOUNDS[what]
        assert f"def {test}(" in (FOLDER.parent / test_file).read_text(), what
