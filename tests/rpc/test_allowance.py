# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The call quota's token bucket (csrc/rpc/quota.h) on a virtual clock: its limit, its rate and its
credit.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from cffi import FFI

CSRC = Path(__file__).resolve().parents[2] / "csrc"
RATE = 4  # calls per second
SECOND = 1_000_000_000

SOURCE = """
#include "rpc/quota.h"
void fill(bl_allowance *a, uint32_t rate, uint64_t now_ns) { bl_allowance_fill(a, rate, now_ns); }
int take(bl_allowance *a, uint32_t rate, uint32_t method)
{
    return bl_allowance_take(a, rate, method);
}
"""
DECLARED = """
typedef struct { int64_t tokens; uint64_t filled_ns; } bl_allowance;
void fill(bl_allowance *, uint32_t, uint64_t);
int take(bl_allowance *, uint32_t, uint32_t);
"""
LOOKUP = 1
GIVERS = (3, 4, 5)  # commit, abort, release


class Bucket:
    """One session's bucket, empty at time 0."""

    def __init__(self, ffi: FFI, library: Any) -> None:
        self._library = library
        self._bucket = ffi.new("bl_allowance *")

    def at(self, now_ns: int) -> Bucket:
        self._library.fill(self._bucket, RATE, now_ns)
        return self

    def taken(self, method: int = LOOKUP) -> int:
        """Return how many consecutive calls are admitted."""
        count = 0
        while self._library.take(self._bucket, RATE, method):
            count += 1
        return count


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[FFI, Any]:
    folder = tmp_path_factory.mktemp("allowance")
    (folder / "allowance.c").write_text(SOURCE)
    target = folder / "allowance.so"
    command = ["cc", "-std=gnu11", "-shared", "-fPIC", f"-I{CSRC}", "-o", str(target)]
    subprocess.run([*command, str(folder / "allowance.c")], check=True)
    ffi = FFI()
    ffi.cdef(DECLARED)
    return ffi, ffi.dlopen(str(target))


@pytest.fixture
def bucket(made: tuple[FFI, Any]) -> Bucket:
    return Bucket(*made)


def test_the_bucket_refills_at_the_rate_in_whole_calls(bucket: Bucket) -> None:
    assert bucket.taken() == 0
    assert bucket.at(SECOND // RATE - 1).taken() == 0
    assert bucket.at(SECOND // RATE).taken() == 1  # earlier tokens count, too
    assert bucket.at(SECOND // RATE).taken() == 0  # no tokens are added twice for the same time
    assert bucket.at(SECOND).taken() == RATE - 1


def test_a_bucket_holds_the_tokens_of_one_second(bucket: Bucket) -> None:
    assert bucket.at(1000 * SECOND).taken() == RATE
    assert bucket.at(1001 * SECOND).taken() == RATE
    assert bucket.at(1001 * SECOND + SECOND // 2).taken() == RATE // 2


@pytest.mark.parametrize("method", GIVERS)
def test_calls_that_release_space_have_a_credit_of_one_bucket(bucket: Bucket, method: int) -> None:
    assert bucket.at(SECOND).taken() == RATE
    assert bucket.taken(method) == RATE
    assert bucket.at(2 * SECOND).taken() == 0  # first the credit is repaid
    assert bucket.at(2 * SECOND).taken(method) == RATE
    assert bucket.at(4 * SECOND).taken() == RATE


@pytest.mark.parametrize("method", [0, 1, 2, 6, 7, 8, 9, 10, 11, 64])
def test_other_calls_have_no_credit(bucket: Bucket, method: int) -> None:
    assert bucket.taken(method) == 0
    assert bucket.at(SECOND).taken(method) == RATE
