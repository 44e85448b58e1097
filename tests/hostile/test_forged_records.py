# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A hostile server forges records and entries: those outside the pool's data are misses or errors,
and the client survives.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import liar
from support.emulation import PATIENCE

PAGE = 4096
WITHIN = [[1, PAGE, 0, 1], [2, PAGE, 1024, 0], [17, 16 * PAGE, 4096, 0]]
BEYOND = [
    [1, PAGE, 1024, 1],  # the checksums are past the end,
    [1, PAGE, 64, 0],
    [1, 2 * PAGE, 0, 0],  # or the payload
    [16, 32 << 20, 0, 0],
    [1, 64 << 20, 16384, 1],
    [0, PAGE, 0, 0],
]


def outcomes(directory: Path, cases: list[list[int]]) -> list[tuple[str, object]]:
    """Return the calls and their results."""
    command = [sys.executable, liar.__file__, str(directory), json.dumps(cases)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=120 * PATIENCE, check=False
    )
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert ended.returncode == 0, (lines[-1:], ended.stderr[-2000:])
    assert len(lines) == len(cases) * 12
    return [(call[1], outcome) for call, outcome in zip(lines[::2], lines[1::2], strict=True)]


def test_a_forged_record_past_the_end_of_the_pool_is_no_hit(shm: Path) -> None:
    for call, outcome in outcomes(shm, BEYOND):
        if call == "lookup":  # the caller does not specify the length of the chunks
            assert outcome in (1, "BadReplyError")
        else:
            assert outcome in (0, "BadReplyError"), call


def test_a_block_within_the_bounds_is_accepted(shm: Path) -> None:
    outcome = outcomes(shm, WITHIN)
    assert {answer for call, answer in outcome if call in ("get", "lookup")} == {1}
    assert {answer for call, answer in outcome if call == "put"} == {1}


def test_a_reply_with_a_hit_after_the_hits_is_rejected(shm: Path) -> None:
    """The client would request the remaining keys forever."""
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from support.blocks import keys
from beluga._ffi import lib
from beluga.errors import BadReplyError
from beluga.index import IndexClient
from beluga.pool import Pool
from beluga.rpc import Client, Server
pool = Pool.create([{str(shm / "a")!r}], device_size=16 << 20, sparse=True, max_blocks=64)
server = Server(pool)
server.handle(lib.BL_METHOD_LOOKUP, lambda _: bytes(4) + (1).to_bytes(4, "little"))
server.start()
try:
    IndexClient(Client(pool)).lookup(keys([1]))
except BadReplyError:
    print("refused")
pool.close()
"""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=20 * PATIENCE,
        check=False,
    )
    assert ended.stdout.strip() == "refused", ended.stderr
