# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Keys are the same on every machine, and differ if any part of their input differs."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from beluga.kvcache.keys import Namespace, fold, hash_keys

FIELDS: dict[str, str | int | bytes] = {
    "model": "Qwen3-32B",
    "revision": "9216db57",
    "dtype": "bfloat16",
    "kv_dtype": "fp8",
    "block_size": 16,
    "layout": "NHD",
    "tp_rank": 0,
}
NAMESPACE = Namespace(FIELDS, salt="tenant")
SIZES = [16, 17, 20, 31, 32, 33, 48, 63, 64]


def digests(size: int, count: int, seed: int = 1) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(size) for _ in range(count)]


def one(namespace: Namespace, digest: bytes) -> int:
    low, high = fold(namespace, [digest])[0]
    return int(low) | int(high) << 64


def test_keys_are_the_same_in_every_process() -> None:
    program = (
        "from beluga.kvcache.keys import *\n"
        f"namespace = Namespace({FIELDS!r}, salt='tenant')\n"
        "print(fold(namespace, hash_keys(['a', b'b'])).tobytes().hex())"
    )
    command = [sys.executable, "-c", program]
    there = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert there == fold(NAMESPACE, hash_keys([b"a", "b"])).tobytes().hex()


def test_keys_match_the_first_release() -> None:
    """A pool outlives its programs, so these numbers may change only with the pool format."""
    assert NAMESPACE.digest.hex() == "6897be4df2b10029cd096c3931e983d1"
    assert f"{one(NAMESPACE, bytes(range(16))):032x}" == "8f44479b26552e6d1141f64d90376b32"
    assert f"{one(NAMESPACE, bytes(range(40))):032x}" == "fc1dd3c2d4160cecd89860526e4f2e97"


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_of_the_namespace_changes_every_key(field: str) -> None:
    given_digests = digests(32, 100)
    before = fold(NAMESPACE, given_digests)
    without = {name: value for name, value in FIELDS.items() if name != field}
    for fields in ({**FIELDS, field: "other"}, {**FIELDS, field: 7}, without):
        after = fold(Namespace(fields, salt="tenant"), given_digests)
        assert (before != after).any(axis=1).all()


def test_namespace_of_fractions_is_refused() -> None:
    with pytest.raises(TypeError, match=r"0\.5"):
        Namespace({"scale": 0.5})  # type: ignore[dict-item]


def test_a_namespace_is_independent_of_its_source_dict() -> None:
    fields = dict(FIELDS)
    namespace = Namespace(fields, salt="tenant")
    fields["model"] = "another"
    assert namespace.fields == FIELDS
    assert namespace == NAMESPACE
    assert hash(namespace) == hash(NAMESPACE)


def test_salt_changes_every_key_and_is_not_shown() -> None:
    other = Namespace(FIELDS, salt="other tenant")
    assert (fold(NAMESPACE, digests(16, 100)) != fold(other, digests(16, 100))).any(axis=1).all()
    assert "tenant" not in repr(NAMESPACE)


def test_order_of_the_fields_does_not_matter() -> None:
    turned = Namespace(dict(reversed(FIELDS.items())), salt=b"tenant")
    assert turned.digest == NAMESPACE.digest


fields = st.dictionaries(
    st.text(max_size=3), st.text(max_size=3) | st.integers() | st.binary(max_size=3), max_size=3
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(fields, fields)
@example({"a": "1"}, {"a": 1})
@example({"ab": "c"}, {"a": "bc"})
@example({"a": "b", "c": "d"}, {"a": "bcd"})
def test_namespaces_are_equal_only_with_equal_fields(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert (Namespace(one).digest == Namespace(other).digest) == (one == other)


def test_a_namespace_may_be_a_string() -> None:
    assert Namespace.of("tests") == Namespace({"name": "tests"}) == Namespace.of({"name": "tests"})
    assert Namespace.of(NAMESPACE) is NAMESPACE
    assert Namespace.of(b"tests").digest != Namespace.of("tests").digest


@pytest.mark.parametrize("size", SIZES)
def test_packed_digests_and_a_list_of_them_are_the_same(size: int) -> None:
    listed = digests(size, 50)
    packed = np.frombuffer(b"".join(listed), dtype=np.uint8).reshape(50, size)
    expected = np.array([fold(NAMESPACE, [digest])[0] for digest in listed])
    wide = np.zeros((50, 2 * size), dtype=np.uint8)
    wide[:, ::2] = packed
    for given_digests in (listed, tuple(listed), packed, memoryview(packed), wide[:, ::2]):
        keys = fold(NAMESPACE, given_digests)  # type: ignore[arg-type]
        assert keys.dtype == np.uint64
        assert (keys == expected).all()


@pytest.mark.parametrize("size", SIZES)
def test_every_bit_of_a_digest_changes_about_half_of_the_key(size: int) -> None:
    digest = digests(size, 1)[0]
    whole, key = int.from_bytes(digest, "little"), one(NAMESPACE, digest)
    flipped = [
        (key ^ one(NAMESPACE, (whole ^ 1 << bit).to_bytes(size, "little"))).bit_count()
        for bit in range(8 * size)
    ]
    assert min(flipped) > 24
    assert 60 < sum(flipped) / len(flipped) < 68


def test_sizes_and_trailing_zeros_change_the_digest() -> None:
    keys = {one(NAMESPACE, bytes(size)) for size in range(16, 65)}
    assert len(keys) == 65 - 16


def test_half_a_million_digests_have_no_key_collision() -> None:
    packed = np.frombuffer(random.Random(2).randbytes(16 << 19), dtype=np.uint8).reshape(-1, 16)
    keys = fold(NAMESPACE, packed)
    assert len(np.unique(keys.view([("low", "u8"), ("high", "u8")]))) == 1 << 19


def test_an_empty_list_of_digests_has_no_keys() -> None:
    assert fold(NAMESPACE, []).shape == (0, 2)
    assert fold(NAMESPACE, hash_keys([])).shape == (0, 2)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ([b"x" * 15], "15 bytes"),
        ([b"x" * 65], "65 bytes"),
        ([b"x" * 16, b"x" * 17], "16 to 17 bytes"),
        (np.zeros((3, 8), dtype=np.uint8), "8 bytes"),
        (np.zeros(32, dtype=np.uint8), "shape"),
        (np.zeros((2, 16), dtype=np.int32), "int32"),
        (b"x" * 32, "shape"),
    ],
)
def test_invalid_digests_are_one_line_errors(wrong: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        fold(NAMESPACE, wrong)
    assert "\n" not in str(caught.value)


def test_different_names_have_different_hashes() -> None:
    names = [b"", b"a", b"b", b"ab", b"a\0", b"x" * 1000]
    hashed = hash_keys(names)
    assert hashed.shape == (len(names), 32)
    assert len({row.tobytes() for row in hashed}) == len(names)
