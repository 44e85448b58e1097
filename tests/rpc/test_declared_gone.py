# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An operator's declaration that others are gone applies to sessions without a heartbeat."""

from __future__ import annotations

from pathlib import Path

import pytest
from other_machine import Elsewhere, OtherMachine, beating, serve_as
from support.blocks import eventually, keys

from beluga.cli import serve
from beluga.errors import DeposedError, ServerAliveError, SessionAliveError
from beluga.index import IndexClient, IndexServer
from beluga.pool import Pool
from beluga.rpc import Client, Server

OTHER = (1, 2)
NONCE = 77

pytestmark = pytest.mark.parametrize("coherence", ["software"], indirect=True)


def test_a_server_with_a_moving_heartbeat_is_not_gone(pool: Pool, elsewhere: Elsewhere) -> None:
    with Server(pool, host=1) as first:
        serve_as(pool, epoch=1, boot_id=OTHER)
        with elsewhere(), pytest.raises(ServerAliveError):
            Server(pool, host=2, declared_gone=True).start()
        with Client(pool, host=1) as client:
            client.ping()
        assert first.failure is None


def test_a_session_with_a_moving_heartbeat_is_not_gone(pool: Pool) -> None:
    with Server(pool) as first:
        assert OtherMachine(pool, host=3, boot_id=OTHER).attach(NONCE) == 0
        first.stop()
    with beating(pool, 0, NONCE), pytest.raises(SessionAliveError, match="heartbeat moves"):
        Server(pool, declared_gone=True)
    word = Server(pool, declared_gone=True)
    with beating(pool, 0, NONCE), pytest.raises(SessionAliveError):  # nor when it is used
        assert eventually(lambda: word.watch(0.1, silent_s=1))
        word.start()
    word.stop()


def test_listed_processes_are_declared_gone(pool: Pool) -> None:
    with IndexServer(pool) as first:
        assert OtherMachine(pool, host=3, boot_id=OTHER).attach(NONCE) == 0
        first.stop()
    with IndexServer(pool) as second:
        assert second.stat().inherited_count == 1
    with IndexServer(pool, declared_gone=True) as third:
        assert eventually(lambda: third.stat().inherited_count == 0)


def test_a_process_that_started_later_is_not_declared_gone(pool: Pool) -> None:
    word = IndexServer(pool, declared_gone=True)
    with IndexServer(pool) as first:
        assert OtherMachine(pool, host=3, boot_id=OTHER).attach(NONCE) == 0
        first.stop()
    with word:
        assert word.stat().inherited_count == 1


def test_a_process_that_is_proven_alive_here_is_not_gone(pool: Pool) -> None:
    with IndexServer(pool) as first:
        client = Client(pool)
        IndexClient(client).reserve(keys([1]), length=1 << 20)
        first.stop()
    with IndexServer(pool, declared_gone=True) as second:
        assert second.stat().inherited_count == 1
        assert second.index_stat().held_bytes >= 1 << 20
        client.close()
        assert eventually(lambda: second.index_stat().held_bytes == 0)


def test_the_command_prints_the_declaration_once(
    pool: Pool, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[bool] = []

    class Deposed:
        def __init__(self, *_: object, declared_gone: bool, **__: object) -> None:
            messages.append(declared_gone)

    def run(*_: object, **__: object) -> None:
        if len(messages) < 3:
            raise DeposedError("another server has taken this pool over")

    monkeypatch.setattr("beluga.index.IndexServer", Deposed)
    monkeypatch.setattr(serve, "serve_until_stopped", run)
    serve.serve([str(path) for path in paths], declare_gone=True, standby=True, watch=True)
    assert messages == [True, False, False]
