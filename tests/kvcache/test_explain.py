# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``explain`` names the cause of provoked misses, and reports which causes it cannot determine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from beluga import Client, IndexServer, KVCache, Namespace, Pool
from beluga.index import IndexClient, RemovalReason
from beluga.kvcache import Explanation, explain, known_namespaces
from beluga.kvcache.keys import leave_namespace

FIELDS = {"model": "m", "dtype": "bfloat16", "layout": "NHD", "tp": "0/2", "block_size": 16}
DIGEST = bytes(range(16))
SIZE = 4096


@pytest.fixture
def pool(shm: Path) -> Iterator[Pool]:
    with Pool.create([shm / "a"], device_size=16 << 20, max_blocks=64) as made:
        yield made


def put(
    pool: Pool, namespace: Namespace, digest: bytes = DIGEST, *, count: int = 1, size: int = SIZE
) -> None:
    with KVCache(pool, namespace=namespace) as cache:
        for number in range(count):
            one = digest if number == 0 else number.to_bytes(16, "big")
            assert cache.put([one], [bytes(size)]).stored == 1


def why(pool: Pool, namespace: Namespace, digest: bytes = DIGEST) -> Explanation:
    with Client(pool) as client:
        return explain(client, namespace, [digest])[0]


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        ({"model": "another"}, "namespace"),
        ({"layout": "HND"}, "layout"),
        ({"block_size": 32}, "layout"),
        ({"dtype": "float8"}, "dtype"),
        ({"tp": "1/2"}, "rank"),
        ({"model": "another", "dtype": "float8"}, "namespace"),
    ],
)
def test_blocks_of_another_namespace_are_found(
    pool: Pool, other: dict[str, str | int], cause: str
) -> None:
    with IndexServer(pool):
        put(pool, Namespace(FIELDS | other))
        found = why(pool, Namespace(FIELDS))
    assert (found.state, found.cause) == ("miss", cause)
    for name, value in other.items():
        assert f"{name} is {value!r} there and {FIELDS[name]!r} here" in found.text


def test_an_unexpected_salt_is_explained(pool: Pool) -> None:
    with IndexServer(pool):
        put(pool, Namespace(FIELDS))
        found = why(pool, Namespace(FIELDS, salt="secret"))
    assert found.cause == "salt"
    assert "drop --salt" in found.text


def test_a_salt_that_is_missing_is_suspected_and_never_guessed(pool: Pool) -> None:
    with IndexServer(pool):
        put(pool, Namespace(FIELDS, salt="secret"), count=3)
        assert why(pool, Namespace(FIELDS, salt="secret")).cause == "stored"
        for salt in ("", "wrong"):
            found = why(pool, Namespace(FIELDS, salt=salt))
            assert found.cause == "salt"
            assert "3 blocks" in found.text and "--salt" in found.text
        left = [path.read_text() for path in (pool.runtime_dir / "namespaces").iterdir()]
    assert left and not any("secret" in text.replace('"secret":', "") for text in left)


def test_blocks_that_were_never_stored_leave_no_trace(pool: Pool) -> None:
    with IndexServer(pool):
        put(pool, Namespace(FIELDS), b"another block...")
        found = why(pool, Namespace(FIELDS))
        assert (found.state, found.cause) == ("miss", "never")
        assert "only other hosts" not in found.text
        for file in (pool.runtime_dir / "namespaces").iterdir():
            file.unlink()
        assert "1 blocks are of namespaces" in why(pool, Namespace({"name": "x"})).text


def test_evicted_blocks_are_distinguished_from_removed_ones(pool: Pool) -> None:
    with IndexServer(pool):
        put(pool, Namespace(FIELDS))
        with KVCache(pool, namespace=Namespace(FIELDS)) as cache:
            assert cache.remove([DIGEST]) == 1
        assert why(pool, Namespace(FIELDS)).cause == "removed"


def test_an_evicted_block_is_explained(pool: Pool) -> None:
    """Blocks of 1 MiB fill the space long before the table, whose lines keep their last keys."""
    with IndexServer(pool) as server:
        put(pool, Namespace(FIELDS), count=24, size=1 << 20)
        assert server.index_stat().evict_count > 0
        assert why(pool, Namespace(FIELDS)).cause == "evicted"


def test_a_block_evicted_by_a_full_table_is_explained_after_its_line_is_reused(pool: Pool) -> None:
    """Blocks of 4 KiB fill the table, of 64 lines, long before the space."""
    namespace = Namespace(FIELDS)
    with IndexServer(pool) as server:
        put(pool, namespace, count=70)
        assert server.index_stat().table_evict_count > 0
        found = why(pool, namespace)
        assert (found.state, found.cause) == ("miss", "evicted")
        assert "the block table was full" in found.text and "--block-bytes" in found.text
        assert why(pool, Namespace(FIELDS), b"never was here..").cause == "never"
        with KVCache(pool, namespace=namespace) as cache:  # the block is stored again, and removed
            assert cache.put([DIGEST], [bytes(SIZE)]).stored == 1
            assert why(pool, namespace).cause == "stored"
            assert cache.remove([DIGEST]) == 1
        assert why(pool, namespace).cause == "removed"


def test_a_block_that_is_being_written_is_pending(pool: Pool) -> None:
    namespace = Namespace(FIELDS)
    with IndexServer(pool), Client(pool) as writer, KVCache(writer, namespace=namespace) as cache:
        index = IndexClient(writer)
        grants = index.reserve(cache.keys([DIGEST]), length=SIZE)
        found = why(pool, namespace)
        assert (found.state, found.cause) == ("pending", "pending")
        index.abort(grants)


def test_damaged_bytes_are_explained(pool: Pool) -> None:
    namespace = Namespace(FIELDS)
    with IndexServer(pool):
        put(pool, namespace)
        assert (why(pool, namespace).state, why(pool, namespace).cause) == ("hit", "stored")
        with Client(pool) as client, KVCache(client, namespace=namespace) as cache:
            place = IndexClient(client).lookup(cache.keys([DIGEST])).hits[0].offset
        with Path(pool.devices[0].path).open("r+b") as device:
            device.seek(place + (2 << 20))  # after the superblock's stripe
            assert device.read(8) == bytes(8)
            device.seek(-8, 1)
            device.write(b"damaged!")
        found = why(pool, namespace)
    assert (found.state, found.cause) == ("miss", "checksum")


def test_a_block_lost_by_a_takeover_is_of_the_previous_epoch(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line written by the second server is overwritten; the first server's half has the
    block.
    """
    namespace = Namespace(FIELDS)
    with IndexServer(pool):
        put(pool, namespace)
    with IndexServer(pool):
        with KVCache(pool, namespace=namespace) as cache:
            assert cache.remove([DIGEST]) == 1
        assert why(pool, namespace).cause == "removed"
        put(pool, Namespace({"name": "next"}), b"takes every line", count=64)
        assert why(pool, namespace).cause == "removed"
        forgotten = [RemovalReason.UNKNOWN]
        monkeypatch.setattr(
            IndexClient, "removal_reasons", lambda self, keys: forgotten * len(keys)
        )
        found = why(pool, namespace)
    assert (found.state, found.cause) == ("miss", "epoch")
    assert "the server of epoch 1 had it, but that of epoch 2 does not" in found.text


def test_unreadable_namespace_records_are_ignored(tmp_path: Path) -> None:
    leave_namespace(tmp_path, Namespace({"name": "one", "rank": 1}))
    leave_namespace(tmp_path, Namespace({"name": "two", "digest": b"\x00\x01"}))
    for name, text in (("zz", "{}"), ("10", "{"), ("11", "[]"), ("12", '{"fields": {"a": []}}')):
        (tmp_path / "namespaces" / f"{name}.json").write_text(text)
    found = sorted(known_namespaces(tmp_path), key=lambda one: str(one.fields["name"]))
    assert [(dict(one.fields), one.secret) for one in found] == [
        ({"name": "one", "rank": 1}, False),
        ({"name": "two"}, True),
    ]
