# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""RPC compared with other libraries: every library has a row, and each echo is checked."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
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
    rows = {row["peer"]: row for row in smoke("rpc-peers") if row["peer"] is not None}
    assert set(rows) == {"gRPC", "ZeroMQ", "iceoryx2"}
    for name, row in rows.items():
        echo = ECHOES[str(name)]
        if importlib.util.find_spec(echo.module):
            assert row["ratio_to_peer"] > 0
            assert row["p50_q1_ns"] <= row["p50_ns"] <= row["p50_q3_ns"]
        else:
            assert row["note"] == (
                f"skipped: {echo.package} is not installed; pip install {echo.package}"
            )


def test_calls_from_c_and_from_python_have_rows(smoke: Callable[[str], list[Row]]) -> None:
    rows = {row["case"]: row for row in smoke("rpc-peers") if row["peer"] is None}
    assert list(rows) == ["C to C", "Python to Python, by number", "Python to Python, by name"]
    assert all(row["bytes"] == 64 and row["ops_per_s"] > 0 for row in rows.values())


def test_a_missing_library_is_reported_with_its_install_command() -> None:
    absent = replace(ECHOES["gRPC"], module="no_such_module_of_anybody", package="grpcio")
    assert absent.missing() == "grpcio is not installed; pip install grpcio"


@pytest.mark.parametrize("name", ECHOES)
@pytest.mark.parametrize("size", rpc_peers.SIZES)
def test_an_echo_of_a_library_returns_the_bytes(name: str, size: int) -> None:
    echo: Echo = echoes.ECHOES[name]
    if why := echo.missing():
        pytest.skip(why)
    with echoes.place() as folder:
        stop = echo.serve(folder, size)
        try:
            with echo.client(folder, size) as call:
                for turn in range(3):
                    request = bytes((index * 7 + turn) % 251 for index in range(size))
                    assert call(request) == request
        finally:
            stop()
    assert not Path(folder).exists()
    assert not list(Path("/dev/shm").glob(f"{Path(folder).name}*"))


def test_an_echo_that_returns_other_bytes_is_an_error() -> None:
    sample = rpc_peers._from_python(lambda request: request[:-1] + bytes(1), 64)
    with pytest.raises(BelugaError, match="other bytes"):
        sample(1)
