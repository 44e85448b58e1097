# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Opening, misusing, closing and forking a remote tier."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from remote_blocks import DictStore, blocks
from support.blocks import eventually

from beluga.errors import TierError
from beluga.metrics import REGISTRY
from beluga.tiers.remote import RemoteSettings, RemoteTier, open_remote


@pytest.fixture
def obstore() -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")


@pytest.fixture
def redis() -> None:
    pytest.importorskip("redis", reason="redis is not installed")


def test_passwords_and_options_are_not_in_the_name(redis: None, obstore: None) -> None:
    for url, name in (
        ("redis://user:secret@cache:6380/3?socket_keepalive=True", "redis://cache:6380/3"),
        ("rediss://:secret@cache/0", "rediss://cache/0"),
        (
            "s3://bucket/a/b?endpoint=http://x:9&access_key_id=me&secret_access_key=secret",
            "s3://bucket/a/b",
        ),
    ):
        tier = open_remote(url)
        assert tier.name == name
        tier.close()


@pytest.mark.usefixtures("redis", "obstore")
@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "has no supported scheme"),
        ("cache:6379", "has no supported scheme"),
        ("http://cache/", "that begins with s3://"),
        ("redis://cache:notaport/0", "has an invalid host or port"),
        ("redis://cache:6379/0?no_such_option=1", "redis rejects"),
        ("redis://cache:6379/0?socket_timeout=x", "redis rejects"),
        ("s3://bucket?no_such_option=1", "no_such_option"),
        ("s3:///", "it has no bucket; give s3://BUCKET/PREFIX"),
        ("file://host/path", "file:///path"),
        ("file:relative", "file:///path"),
        ("file:///proc/no/such", "cannot be opened"),
        ("file:///proc/x?option=1", "no options"),
    ],
)
def test_an_invalid_url_is_a_one_line_error(url: str, reason: str) -> None:
    with pytest.raises(TierError, match=reason) as caught:
        open_remote(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("redis://cache/0", r"beluga-kv\[tiers\]"),
        ("memory:///", r"beluga-kv\[tiers\]"),
        ("mooncake://master:50051", "pip install mooncake-transfer-engine"),
    ],
)
def test_a_missing_package_is_a_one_line_error(
    url: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("redis", "obstore", "mooncake", "mooncake.store"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(TierError, match=advice):
        open_remote(url)


def test_no_client_is_imported_before_it_is_used() -> None:
    code = (
        "import sys, beluga.tiers.remote; print({'redis', 'obstore', 'mooncake'} & {*sys.modules})"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"


@pytest.mark.parametrize(
    "wrong",
    [
        {"operation_s": 0},
        {"load_s": -1},
        {"save_s": float("nan")},
        {"open_s": float("inf")},
        {"threads": 1},
        {"retries": -1},
        {"abandoned": 1.5},
        {"failures": 0},
        {"block_bytes": "1 GiB"},
        {"backoff_s": True},
    ],
)
def test_a_wrong_limit_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(TierError, match=next(iter(wrong))):
        RemoteSettings(**wrong)  # type: ignore[arg-type]


def test_arrays_that_do_not_fit_are_refused() -> None:
    tier = RemoteTier(DictStore(), name="test://misuse")
    records, payload = blocks([10] * 3)
    for wrong in (records["key"][0], records["key"].astype(np.int64), records["key"][:, :1], None):
        for method in (tier.load, tier.contains, tier.remove):
            with pytest.raises(TierError, match="keys "):
                method(wrong)  # type: ignore[operator]
    longer = records.copy()
    longer["length"][1] = 11
    for bad in (
        (records["key"], payload),
        (records, payload[:2]),
        (records, payload[0]),
        (records, payload.astype(np.int8)),
        (longer, payload),
        (None, None),
    ):
        with pytest.raises(TierError):
            tier.save(*bad)  # type: ignore[arg-type]
    tier.close()


def test_a_closed_tier_rejects_calls() -> None:
    store = DictStore()
    tier = RemoteTier(store, name="test://closed")
    records, payload = blocks([10])
    assert tier.save(records, payload).all()
    tier.close()
    tier.close()
    assert store.ended
    for call in (tier.load, tier.contains, tier.remove):
        with pytest.raises(TierError, match="is closed"):
            call(records["key"])  # type: ignore[operator]
    with pytest.raises(TierError, match="is closed"):
        tier.save(records, payload)
    assert (("tier", "test://closed"),) not in REGISTRY.gauge(
        "beluga_tier_breaker_state", ""
    ).sample().series


def test_close_completes_running_operations_and_drops_the_others() -> None:
    gate = threading.Event()
    store = DictStore(lambda operation: operation == "get" and gate.wait() and None)
    tier = RemoteTier(
        store, name="test://closing", settings=RemoteSettings(threads=2, operation_s=60, load_s=60)
    )
    records, payload = blocks([10] * 5)
    assert tier.save(records, payload).all()
    with ThreadPoolExecutor(2) as pool:
        load = pool.submit(tier.load, records["key"])
        assert eventually(lambda: store.running == 2, 60)
        close = pool.submit(tier.close)
        assert eventually(tier._closing.is_set, 60)
        gate.set()
        close.result(60)
        found = [each is not None for each in load.result(60)]
    assert found == [True, True, False, False, False]
    assert store.ended


def test_a_forked_child_opens_its_own_connection() -> None:
    store = DictStore()
    tier = RemoteTier(store, name="test://forked")
    records, payload = blocks([10])
    assert tier.save(records, payload).all()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            tier.load(records["key"])
        except TierError as error:
            status = 0 if "after fork" in str(error) else 2
        tier.close()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tier.contains(records["key"]).all()
    tier.close()


def test_the_interpreter_ends_although_a_thread_hangs() -> None:
    code = """
import time
from remote_blocks import DictStore, blocks
from beluga.tiers.remote import RemoteSettings, RemoteTier
store = DictStore(lambda operation: time.sleep(1e6))
tier = RemoteTier(store, name="x", settings=RemoteSettings(operation_s=.05, load_s=.1))
print(tier.load(blocks([1])[0]["key"]))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "[None]\n"), ran.stderr


@pytest.mark.parametrize(("cpus", "threads"), [(1, 2), (2, 2), (4, 4), (64, 8)])
def test_a_client_of_redis_has_no_more_threads_than_cpus(
    cpus: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("redis", reason="redis is not installed")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cpus)))
    with closing(open_remote("redis://127.0.0.1:1/0", settings=RemoteSettings())) as tier:
        assert tier.threads == threads
    with closing(open_remote("redis://127.0.0.1:1/0", settings=RemoteSettings(threads=5))) as tier:
        assert tier.threads == 5, "the setting is used"
