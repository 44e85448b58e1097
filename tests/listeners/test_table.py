# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The table of docs/operate/listeners.md: for each defense and each listener the behavior and its
test, or the reason why the listener needs no such defense.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

LISTENERS = ("clients", "operators", "admin port", "local socket", "events", "prefill queue")


class Cell(NamedTuple):
    """A statement of the table, and its test (``file::function``), or "" for a reason."""

    text: str
    test: str = ""


_ATTACKS, _CALLERS = "test_attacks.py", "test_callers.py"
_QUEUE, _ODD = "test_prefill_queue.py", "test_odd_http.py"
_SOCKETS = "../events/test_event_sockets.py"
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
        Cell("frames of 1 KiB", f"{_ATTACKS}::test_a_router_that_sends_too_much_is_disconnected"),
        _CONNECTS,
    ),
    "clients that do not read": _http(
        "the slowest connection is closed",
        f"{_ATTACKS}::test_clients_that_do_not_read_do_not_block_others",
        Cell(
            "a replay ends after 10 s; at most 10,000 messages wait",
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
        Cell("frames of 1 KiB; not their number (see below)"),
        Cell(
            "1 MiB and 1,024 tasks", "../disagg/test_queue.py::test_the_size_of_a_task_is_bounded"
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
        *[Cell("one: 400, 404", f"{_ODD}::test_the_server_has_one_spelling_of_a_path")] * 2,
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
                names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
                assert name in names, cell.test


def test_every_test_of_an_attack_is_in_the_table() -> None:
    named = {cell.test for cells in TABLE.values() for cell in cells}
    for node in ast.parse((FOLDER / _ATTACKS).read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            assert f"{_ATTACKS}::{node.name}" in named
