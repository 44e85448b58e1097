# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""RPC compared with other libraries: every library has a row, and each echo is checked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from beluga_bench import Row
from beluga_bench.harness.machine import cores
from beluga_bench.peers import echoes, rpc_peers
from beluga_bench.peers.echoes import ECHOES, Echo

from beluga.errors import BelugaError

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="needs two cores")


@pytest.mark.long
def test_every_library_has_a_row_or_a_reason(smoke: Callable[[str], list[Row]]) -> None:
    rows = {row["peer"]: row for row in smoke("rpc-peers") if row["peer"] in ECHOES}
    assert set(rows) == {"gRPC", "ZeroMQ", "iceoryx2", "pipe", "Redis"}
    for name, row in rows.items():
        echo = ECHOES[str(name)]
        if why := echo.missing():
            assert row["note"] == f"skipped: {why}"
        else:
            assert row["ratio_to_peer"] > 0
            assert row["p50_q1_ns"] <= row["p50_ns"] <= row["p50_q3_ns"]


def test_the_papers_figures_of_rdma_are_rows_without_a_measurement(
    smoke: Callable[[str], list[Row]],
) -> None:
    rows = [row for row in smoke("rpc-peers") if row["case"] == "the paper's machine"]
    figures = {(row["peer"], row["depth"]): row["paper"] for row in rows}
    assert figures["RDMA, reliable connection", 1] == "8.39 us round trip"
    assert figures["RDMA, unreliable datagram", 128] == "6.65 M calls/s"
    for row in rows:
        assert str(row["note"]).startswith("skipped: not measured here")
        assert row["p50_ns"] is row["ops_per_s"] is row["memory"] is None


def test_calls_from_c_and_from_python_have_rows(smoke: Callable[[str], list[Row]]) -> None:
    rows = {row["case"]: row for row in smoke("rpc-peers") if row["peer"] is None}
    assert list(rows) == ["C to C", "Python to Python, by number", "Python to Python, by name"]
    assert all(row["bytes"] == 64 and row["ops_per_s"] > 0 for row in rows.values())


def test_a_missing_library_is_reported_with_its_install_command() -> None:
    absent = replace(ECHOES["gRPC"], module="no_such_module_of_anybody", package="grpcio")
    assert absent.missing() == "grpcio is not installed; pip install grpcio"


def test_mooncakes_master_has_a_row_or_a_reason(smoke: Callable[[str], list[Row]]) -> None:
    (row,) = [row for row in smoke("rpc-peers") if row["peer"] == "Mooncake"]
    assert (row["case"], row["bytes"]) == ("Python to a master in C++", 64)
    if why := rpc_peers._mooncake_missing():
        assert row["note"] == f"skipped: {why}"
    else:
        assert row["p50_ns"] > 0


def test_a_missing_server_is_reported_with_its_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("redis")
    monkeypatch.setenv("PATH", "")
    why = ECHOES["Redis"].missing()
    assert why == "redis-server is not installed; on Debian: apt-get install redis-server"


@pytest.mark.parametrize("name", ECHOES)
@pytest.mark.parametrize("size", rpc_peers.SIZES)
def test_an_echo_of_a_library_returns_the_bytes(name: str, size: int) -> None:
    echo: Echo = echoes.ECHOES[name]
    if why := echo.missing():
        pytest.skip(why)
    with echoes.socket_folder() as folder, ExitStack() as stack:
        if echo.program is not None:
            stack.enter_context(echo.program(folder))
        elif echo.serve is not None:
            stack.callback(echo.serve(folder, size))
        call = stack.enter_context(echo.client(folder, size))
        for turn in range(3):
            request = bytes((index * 7 + turn) % 251 for index in range(size))
            assert call(request) == request
    assert not Path(folder).exists()
    assert not list(Path("/dev/shm").glob(f"{Path(folder).name}*"))


def test_an_echo_that_returns_other_bytes_is_an_error() -> None:
    sample = rpc_peers._from_python(lambda request: request[:-1] + bytes(1), 64)
    with pytest.raises(BelugaError, match="other bytes"):
        sample(1)
