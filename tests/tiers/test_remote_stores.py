# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The remote tier over real stores and their clients: opening, misusing, closing and forking; every
spelling of an endpoint; replies that are cut, changed or late; stores that stop, fill up or vanish.
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from remote_stores import (
    ByteProxy,
    DictStore,
    FakeS3,
    RedisServer,
    blocks,
    cut_after,
    flip_every,
    intact,
    same,
)
from support import role
from support.blocks import eventually
from support.commands import captured
from support.forks import in_child
from support.role import Process

from beluga import KVCache, Pool
from beluga.errors import TierError
from beluga.index import IndexServer
from beluga.metrics import REGISTRY
from beluga.tiers import TierService
from beluga.tiers.arena import Arena
from beluga.tiers.remote import (
    RefusedError,
    RemoteSettings,
    RemoteTier,
    check_remote,
    open_remote,
    store_name,
)
from beluga.tiers.remote.objects import ClientPanicError, ObstoreStore, no_panic
from beluga.tiers.remote.valkey import _read_string

pytest.importorskip("obstore", reason="obstore is not installed")

CLIENT_SETTINGS = RemoteSettings(operation_s=20, load_s=40, save_s=40)
DATA = b"an object"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
S3 = "access_key_id=a&secret_access_key=b"
AZ = f"account_name=devstoreaccount1&account_key={KEY.replace('+', '%2B')}"

ARENA = Arena()


@pytest.fixture
def with_redis() -> None:
    pytest.importorskip("redis", reason="redis is not installed")


def test_passwords_and_options_are_not_in_the_name(with_redis: None) -> None:
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


@pytest.mark.usefixtures("with_redis")
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
        *({"operation_s": 0}, {"load_s": -1}, {"save_s": float("nan")}, {"open_s": float("inf")}),
        *({"threads": 1}, {"retries": -1}, {"abandoned": 1.5}, {"failures": 0}),
        *({"block_bytes": "1 GiB"}, {"backoff_s": True}),
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
        loaded = [each is not None for each in load.result(60)]
    assert loaded == [True, True, False, False, False]
    assert store.ended


def test_a_forked_child_opens_its_own_connection() -> None:
    store = DictStore()
    tier = RemoteTier(store, name="test://forked")
    records, payload = blocks([10])
    assert tier.save(records, payload).all()

    def load() -> None:
        with pytest.raises(TierError, match="after fork"):
            tier.load(records["key"])
        tier.close()

    assert in_child(load) == "None"
    assert tier.contains(records["key"]).all()
    tier.close()


def load_from_a_store_that_hangs() -> None:
    store = DictStore(lambda operation: time.sleep(1e6))
    tier = RemoteTier(store, name="x", settings=RemoteSettings(operation_s=0.05, load_s=0.1))
    role.reply(tier.load(blocks([1])[0]["key"]))


def test_the_interpreter_ends_although_a_thread_hangs() -> None:
    ran = role.run(load_from_a_store_that_hangs)
    assert (ran.returncode, ran.stdout) == (0, "[None]\n"), ran.stderr


@pytest.mark.usefixtures("with_redis")
@pytest.mark.parametrize(("cpus", "threads"), [(1, 2), (2, 2), (4, 4), (64, 8)])
def test_a_client_of_redis_has_no_more_threads_than_cpus(
    cpus: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cpus)))
    with closing(open_remote("redis://127.0.0.1:1/0", settings=RemoteSettings())) as tier:
        assert tier.threads == threads
    with closing(open_remote("redis://127.0.0.1:1/0", settings=RemoteSettings(threads=5))) as tier:
        assert tier.threads == 5, "the setting is used"


class _Store(BaseHTTPRequestHandler):
    """Any store; every object exists."""

    paths: list[str]

    def _answer(self) -> None:
        self.paths.append(self.path)
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        for name, value in (
            ("Content-Length", str(len(DATA))),
            ("ETag", '"1"'),
            ("Last-Modified", "Mon, 02 Nov 2026 00:00:00 GMT"),
            ("x-ms-version", "2023-11-03"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(DATA)

    do_GET = do_HEAD = do_PUT = do_POST = _answer  # noqa: N815

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    """The HOST:PORT of a store over http, and the requested paths."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    paths: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Store", (_Store,), {"paths": paths}))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"127.0.0.1:{server.server_port}", paths
    server.shutdown()
    server.server_close()


SPELLINGS = [
    # the URL; the environment
    (f"s3://bucket/p?endpoint=http://HERE&{S3}", {}),
    (f"s3://bucket/p?endpoint_url=http://HERE&{S3}", {}),
    (f"s3://bucket/p?aws_endpoint=http://HERE&{S3}", {}),
    (f"s3://bucket/p?aws_endpoint_url=http://HERE&{S3}", {}),
    (f"s3://bucket/p?AWS_ENDPOINT_URL=http://HERE&{S3}", {}),
    (f"s3://bucket/p?AWS_ENDPOINT_URL_S3=http://HERE&{S3}", {}),
    (f"s3://bucket/p?endpoint=http://HERE/&allow_http=true&{S3}", {}),
    (f"s3://bucket/p?endpoint=http://HERE&aws_allow_http=true&{S3}", {}),
    ("s3://bucket/p?endpoint=http://HERE&skip_signature=true", {}),
    (f"s3://bucket/p?{S3}", {"AWS_ENDPOINT_URL": "http://HERE"}),
    (f"s3://bucket/p?{S3}", {"AWS_ENDPOINT_URL_S3": "http://HERE"}),
    (f"s3://bucket/p?{S3}", {"AWS_ENDPOINT_URL_S3": "http://HERE", "AWS_ENDPOINT_URL": "http://a"}),
    (f"s3://bucket/p?{S3}", {"AWS_ENDPOINT_URL": "http://HERE", "AWS_ALLOW_HTTP": "true"}),
    ("gs://bucket/p?endpoint=http://HERE", {}),
    ("gs://bucket/p?endpoint_url=http://HERE", {}),
    ("gs://bucket/p?base_url=http://HERE&allow_http=true", {}),
    ("gs://bucket/p?google_base_url=http://HERE&skip_signature=true", {}),
    ("gs://bucket/p", {"STORAGE_EMULATOR_HOST": "HERE"}),
    ("gs://bucket/p", {"STORAGE_EMULATOR_HOST": "http://HERE"}),
    (f"az://bucket/p?endpoint=http://HERE/devstoreaccount1&{AZ}", {}),
    (f"az://bucket/p?endpoint_url=http://HERE/devstoreaccount1&allow_http=true&{AZ}", {}),
    (f"az://bucket/p?azure_storage_endpoint=http://HERE/devstoreaccount1&{AZ}", {}),
    (f"az://bucket/p?blob_endpoint=http://HERE/devstoreaccount1&{AZ}", {}),
    ("az://bucket/p?use_emulator=true", {"AZURITE_BLOB_STORAGE_URL": "http://HERE"}),
    (
        "az://bucket/p",
        {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": "http://HERE"},
    ),
    (
        "az://bucket/p",
        {
            "AZURE_STORAGE_CONNECTION_STRING": "DefaultEndpointsProtocol=http;AccountName="
            f"devstoreaccount1;AccountKey={KEY};BlobEndpoint=http://HERE/devstoreaccount1;"
        },
    ),
    (
        "az://bucket/p",
        {
            "AZURE_STORAGE_CONNECTION_STRING": "UseDevelopmentStorage=true",
            "AZURITE_BLOB_STORAGE_URL": "http://HERE",
        },
    ),
]


@pytest.mark.parametrize(("url", "environment"), SPELLINGS)
def test_every_spelling_of_an_endpoint_reaches_the_store(
    store: tuple[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    environment: dict[str, str],
) -> None:
    url_here, paths = store
    for name, value in environment.items():
        monkeypatch.setenv(name, value.replace("HERE", url_here))
    made = ObstoreStore(urlsplit(url.replace("HERE", url_here)), CLIENT_SETTINGS)
    assert bytes(made.get("name") or b"") == DATA
    made.put("name", memoryview(DATA))
    assert made.exists(["name"]) == [True]
    assert len(paths) >= 3
    assert all("bucket" in path for path in paths)


@pytest.mark.parametrize(
    ("url", "environment"),
    [
        ("s3://bucket/p?endpoint=HERE", {}),  # no scheme: obstore panics in the first request
        ("s3://bucket/p?endpoint=http://[::", {}),
        ("s3://bucket/p?endpoint=not a url", {}),
        ("s3://bucket/p?endpoint=ftp://HERE", {}),
        ("s3://bucket/p?endpoint=http://", {}),
        ("s3://bucket/p?endpoint=http://HERE:port", {}),
        ("s3://bucket/p", {"AWS_ENDPOINT_URL": "HERE"}),
        ("gs://bucket/p?endpoint=ftp://HERE", {}),
        ("az://bucket/p?endpoint=HERE&account_name=a", {}),
        ("az://bucket/p?use_emulator=true", {"AZURITE_BLOB_STORAGE_URL": "HERE"}),
    ],
)
def test_an_endpoint_that_is_not_a_url_is_rejected_at_construction(
    monkeypatch: pytest.MonkeyPatch, url: str, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TierError, match=r"endpoint is .*; write http://HOST:PORT"):
        check_remote(url)


def test_an_invalid_client_option_is_an_error_and_no_panic() -> None:
    for option in ("allow_http=perhaps", "timeout=soon", "endpointt=http://a", "proxy_url=%00"):
        with pytest.raises(TierError):
            check_remote(f"s3://bucket/p?endpoint=http://127.0.0.1:9&{option}")


class PanicException(BaseException):
    """The class that pyo3 uses for a panic in Rust."""


def test_a_panic_of_a_client_is_an_error_without_retry(
    store: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: object, **__: object) -> None:
        raise PanicException("index out of bounds")

    made = ObstoreStore(urlsplit(f"s3://bucket/p?endpoint=http://{store[0]}&{S3}"), CLIENT_SETTINGS)
    for name in ("get", "put", "head", "delete"):
        monkeypatch.setattr(made._obstore, name, panic)
    for name, arguments in ("get", ("a",)), ("put", ("a", memoryview(b""))), ("exists", (["a"],)):
        with pytest.raises(RefusedError, match="index out of bounds"):
            getattr(made, name)(*arguments)
    with pytest.raises(KeyboardInterrupt), no_panic():
        raise KeyboardInterrupt
    with pytest.raises(ClientPanicError), no_panic():
        panic()


def test_a_store_at_another_endpoint_or_account_has_another_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Removals wait for the store that had the blocks."""
    for variable in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        monkeypatch.delenv(variable, raising=False)
    base = store_name(f"s3://bucket/p?endpoint=http://here:9000&{S3}")
    assert base.startswith("s3://bucket/p ")
    assert store_name("s3://bucket/p") == "s3://bucket/p"
    assert base == store_name("s3://bucket/p?aws_endpoint_url=http://HERE:9000/&access_key_id=new")
    assert base != store_name(f"s3://bucket/p?endpoint=http://there:9000&{S3}")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://here:9000")
    assert store_name("s3://bucket/p") == base
    assert store_name("az://c?account_name=a") != store_name("az://c?account_name=b")
    assert store_name("redis://user:secret@cache/3") == "redis://cache/3"
    with pytest.raises(TierError, match="write http://HOST:PORT"):
        store_name("s3://bucket/p?endpoint=nowhere")


@pytest.mark.parametrize("kind", ["file", "s3", pytest.param("redis", marks=pytest.mark.slow)])
def test_servers_that_open_a_store_at_once_agree_on_its_number(kind: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        if kind == "redis":
            redis = RedisServer()
            stack.callback(redis.kill)
        fake = stack.enter_context(closing(FakeS3()))
        url = {"file": f"file://{tmp_path}", "s3": fake.url()}.get(kind) or redis.url
        tiers = [stack.enter_context(closing(open_remote(url))) for _ in range(6)]
        with ThreadPoolExecutor(len(tiers)) as threads:
            (number,) = set(threads.map(lambda tier: tier.store_number([]), tiers))
        assert number is not None
        assert tiers[0].store_number([number + 1]) == number
        tiers[1]._store.put("beluga-store", memoryview(b"damaged"))
        assert tiers[0].store_number([]) is None


Lines = tuple[socket.socket, socket.socket]


@pytest.fixture
def lines() -> Iterator[Lines]:
    near, far = socket.socketpair()
    near.settimeout(20)
    with near, far:
        yield near, far


@pytest.mark.parametrize("size", [1, 2, 4088, 4089, 4090, 4091, 4092, 4093, 4094, 4096, 1 << 20])
def test_a_string_is_read_whole(lines: Lines, size: int) -> None:
    near, far = lines
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    sender = threading.Thread(target=far.sendall, args=(b"$%d\r\n%s\r\n" % (size, data),))
    sender.start()
    assert bytes(_read_string(near, size, ARENA) or b"") == data
    sender.join()
    far.sendall(b"$1\r\nx\r\n")
    assert bytes(_read_string(near, 1, ARENA) or b"") == b"x", "the next answer is the next"


def test_a_string_that_arrives_byte_by_byte_is_read_completely(lines: Lines) -> None:
    near, far = lines
    far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)

    def send() -> None:
        for byte in b"$5\r\na\r\nb\r\r\n":
            far.sendall(bytes([byte]))

    sender = threading.Thread(target=send)
    sender.start()
    assert bytes(_read_string(near, 5, ARENA) or b"") == b"a\r\nb\r"
    sender.join()


def test_a_null_string_is_none_and_an_error_a_refusal_with_its_text(lines: Lines) -> None:
    near, far = lines
    far.sendall(b"$0\r\n\r\n")
    assert _read_string(near, 10, ARENA) is None
    far.sendall(b"-NOAUTH Authentication required.\r\n")
    with pytest.raises(RefusedError, match="NOAUTH Authentication required"):
        _read_string(near, 10, ARENA)


@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"$5", b"$5\r\nabc", b"$-1\r\n", b"$\r\n\r\n", b"$1e3\r\n", b"+OK\r\n", b"\r\n"),
        *(b"$11\r\nabcdefghijk\r\n", b"$99999999999999999999\r\n", b"x" * 20_000, b":1\r\n"),
        *(b"$" + b"9" * 5000 + b"\r\n", b"$2\r\nabc\r\n", b"$2\r\nabcd"),
        *(b"$2\r\nab\r\n$2\r\nab\r\n", b"*2\r\n$1\r\na\r\n$1\r\nb\r\n"),
    ],
)
def test_any_other_reply_closes_the_connection(lines: Lines, answer: bytes) -> None:
    near, far = lines
    sender = threading.Thread(target=far.sendall, args=(answer,))
    sender.start()
    sender.join()
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError):
        _read_string(near, 10, ARENA)


def test_the_buffer_is_reused_but_never_shared(lines: Lines) -> None:
    near, far = lines
    arena, size = Arena(), 1 << 20

    def read_string(byte: bytes) -> memoryview:
        sender = threading.Thread(
            target=far.sendall, args=(b"$%d\r\n%s\r\n" % (size, byte * size),)
        )
        sender.start()
        string = _read_string(near, size, arena)
        sender.join()
        assert string is not None
        return string

    def address(buffer: memoryview) -> int:
        return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])

    first = read_string(b"a")
    second = read_string(b"b")
    assert bytes(first) == b"a" * size
    start = address(first)
    assert address(second) != start
    del first
    assert address(read_string(b"c")) == start
    assert bytes(second) == b"b" * size


PATIENT = RemoteSettings(operation_s=20, load_s=40, save_s=40)

COUNT, LENGTH = 40, 100_000
NAMES = [hashlib.sha256(b"block %d" % number).digest() for number in range(COUNT)]

SETTINGS = RemoteSettings(
    operation_s=1, load_s=2, save_s=20, retries=1, backoff_s=0.001, open_s=0.01, open_limit_s=0.05
)


@pytest.fixture(
    params=["memory", "file", pytest.param("redis", marks=pytest.mark.slow)],
)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "redis":
        server = RedisServer()
        yield server.url
        server.kill()
        return
    pytest.importorskip("obstore", reason="obstore is not installed")
    yield "memory:///" if request.param == "memory" else f"file://{tmp_path}/blocks of all"


@pytest.fixture
def tier(url: str) -> Iterator[RemoteTier]:
    made = open_remote(url, settings=PATIENT)
    yield made
    made.close()


def test_saved_blocks_are_loaded_and_others_are_misses(tier: RemoteTier) -> None:
    records, payload = blocks([0, 1, 63, 64, 65, 4096, 100_000, 3 << 20])
    others, _ = blocks([5] * 3, seed=1)
    assert not tier.contains(records["key"]).any()
    assert tier.save(records, payload).all()
    keys = np.concatenate([others["key"], records["key"]])
    assert tier.contains(keys).tolist() == [False] * 3 + [True] * 8
    loaded = tier.load(keys)
    assert loaded[:3] == [None] * 3
    assert all(same(loaded[3:], records, payload))


def test_a_block_is_removed_once(tier: RemoteTier) -> None:
    records, payload = blocks([1000] * 5)
    assert tier.save(records, payload).all()
    assert tier.remove(records["key"][:2]) == 2
    assert tier.remove(records["key"]) == 3
    assert tier.remove(records["key"]) == 0
    assert same(tier.load(records["key"]), records, payload) == [False] * 5


def test_an_empty_batch_sends_no_request(tier: RemoteTier) -> None:
    records, payload = blocks([])
    assert tier.save(records, payload).shape == (0,)
    assert tier.load(records["key"]) == []
    assert tier.contains(records["key"]).shape == (0,)
    assert tier.remove(records["key"]) == 0


def test_a_foreign_object_under_the_key_is_replaced(tier: RemoteTier) -> None:
    """Also through the client: an object that is empty, short, foreign or that of another block."""
    records, payload = blocks([5000] * 6)
    assert tier.save(records, payload).all()
    store = tier._store
    names = [f"beluga-1/{key.tobytes().hex()[:2]}/{key.tobytes().hex()}" for key in records["key"]]
    right = bytes(store.get(names[0]) or b"")
    wrong = [b"", b"short", right[:-1], right + b"x", right[:100] + b"\0\1" + right[102:]]
    for name, contents in zip(names[1:], wrong, strict=True):
        store.put(name, memoryview(contents))
    store.put(names[1], memoryview(right))
    expected = [True] + [False] * 5
    assert same(tier.load(records["key"]), records, payload) == expected
    assert tier.save(records, payload).all()
    assert all(same(tier.load(records["key"]), records, payload))


def saver(url: str) -> None:
    tier = open_remote(url)
    for _ in role.lines():
        role.reply(tier.save(*blocks([100_000] * 20, seed=7)).all())


def test_a_block_outlives_the_process_that_saved_it(url: str) -> None:
    """The worked example: two processes, each with a pool of its own, over one store."""
    if url.startswith("memory:"):
        pytest.skip("a memory is of one process")
    records, payload = blocks([100_000] * 20, seed=7)
    with Process(saver, url) as child:
        assert child.request("save") == "True"
        child.kill()
    loader = open_remote(url, settings=PATIENT)
    assert all(same(loader.load(records["key"]), records, payload))
    loader.close()


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_an_object_that_is_too_large_is_not_read(kind: str, tmp_path: Path) -> None:
    """Any client of the store may have written it."""
    pytest.importorskip("obstore", reason="obstore is not installed")
    url = "memory:///" if kind == "memory" else f"file://{tmp_path}/blocks"
    settings = RemoteSettings(block_bytes=4096)
    tier = open_remote(url, settings=settings)
    try:
        limit = settings.object_bytes
        tier._store.put("largest", memoryview(bytes(limit)))
        tier._store.put("larger", memoryview(bytes(limit + 1)))
        content = tier._store.get("largest")
        assert content is not None
        assert len(content) == limit
        with pytest.raises(RefusedError, match=f"an object of {limit + 1} bytes is too large"):
            tier._store.get("larger")
    finally:
        tier.close()


@contextlib.contextmanager
def rack(
    folder: Path, shared_url: str, settings: RemoteSettings
) -> Iterator[tuple[KVCache, IndexServer]]:
    """Serve a pool with a remote tier below it."""
    folder.mkdir()
    tier = open_remote(shared_url, settings=settings)
    with Pool.create([folder / "pool"], device_size=24 << 20, sparse=True) as pool:
        server = IndexServer(pool)
        service = TierService(server, pool, [tier])
        with server:
            service.start()
            try:
                with KVCache(pool, namespace="a model", timeout_s=60) as cache:
                    yield cache, server
            finally:
                service.stop()
                tier.close()


@pytest.fixture(params=["file", pytest.param("redis", marks=pytest.mark.slow)])
def shared_url(request: pytest.FixtureRequest, shm: Path) -> Iterator[str]:
    if request.param == "redis":
        redis = RedisServer()
        yield redis.url
        redis.kill()
        return
    pytest.importorskip("obstore", reason="obstore is not installed")
    yield f"file://{shm}/store"


def test_blocks_of_one_pool_are_loaded_into_another(shm: Path, shared_url: str) -> None:
    data = np.random.default_rng(0).integers(0, 256, (COUNT, LENGTH), np.uint8)
    with rack(shm / "a", shared_url, PATIENT) as (cache, server):
        assert cache.put(NAMES, data).stored == COUNT
        assert eventually(lambda: server.lower_stat().dirty_count == 0, 60)
    with rack(shm / "b", shared_url, PATIENT) as (cache, server):
        target = np.zeros_like(data)
        assert cache.get(NAMES, target).hits == COUNT
        assert np.array_equal(target, data)


@pytest.mark.slow
def test_a_remote_store_that_is_stopped_keeps_no_hit_of_the_pool(shm: Path) -> None:
    redis = RedisServer()
    data = np.random.default_rng(0).integers(0, 256, (COUNT, LENGTH), np.uint8)
    settings = RemoteSettings(operation_s=2, load_s=4)
    with rack(shm / "a", redis.url, settings) as (cache, server):
        assert cache.put(NAMES, data).stored == COUNT
        assert eventually(lambda: server.lower_stat().dirty_count == 0, 60)
        redis.stop()
        unknown = [hashlib.sha256(b"another %d" % number).digest() for number in range(8)]
        target = np.zeros((8, LENGTH), np.uint8)
        for _ in range(5):
            assert cache.get(unknown, target).hits == 0
        target = np.zeros_like(data)
        for _ in range(20):
            assert cache.get(NAMES, target).hits == COUNT
        assert np.array_equal(target, data)
        redis.go_on()
    redis.kill()


def state(tier: RemoteTier) -> float:
    return REGISTRY.gauge("beluga_tier_breaker_state", "").value(tier=tier.name)


class Stored:
    """A tier with blocks that its store has."""

    def __init__(self, tier: RemoteTier, lengths: list[int], seed: int = 0) -> None:
        self.tier = tier
        self.records, self.payload = blocks(lengths, seed=seed)
        assert self.saves_all()

    def loaded(self) -> list[bool]:
        return same(self.tier.load(self.records["key"]), self.records, self.payload)

    def saves_all(self) -> bool:
        return bool(self.tier.save(self.records, self.payload).all())

    def recovered(self) -> bool:
        return eventually(lambda: all(self.loaded()), 60)

    def recovers(self) -> bool:
        """Return whether all blocks are hits eventually, after at most one save."""
        return eventually(self.saves_all, 60) and self.recovered()


class Scene(Stored):
    """A tier with blocks, and the proxy between it and its store."""

    def __init__(self, tier: RemoteTier, proxy: ByteProxy) -> None:
        super().__init__(tier, [30_000] * 12, seed=99)
        self.proxy = proxy


@pytest.fixture
def s3() -> Iterator[tuple[FakeS3, Stored]]:
    pytest.importorskip("obstore", reason="obstore is not installed")
    server = FakeS3()
    with contextlib.closing(open_remote(server.url(), settings=SETTINGS)) as tier:
        yield server, Stored(tier, [100] * 5)
    server.close()


@pytest.fixture(params=["s3", pytest.param("redis", marks=pytest.mark.slow)])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    server: FakeS3 | RedisServer
    if request.param == "s3":
        pytest.importorskip("obstore", reason="obstore is not installed")
        server = FakeS3()
        proxy = ByteProxy(server.port)
        url = server.url(proxy.port)
    else:
        server = RedisServer()
        proxy = ByteProxy(server.port)
        url = f"redis://127.0.0.1:{proxy.port}/0"
    tier = open_remote(url, settings=SETTINGS)
    made = Scene(tier, proxy)
    assert all(made.loaded())
    yield made
    proxy.close()
    tier.close()
    server.close() if isinstance(server, FakeS3) else server.kill()


def test_truncated_replies_are_misses(scene: Scene) -> None:
    for limit in (0, 10, 200, 29_000):
        scene.proxy.spoil = cut_after(limit)
        scene.proxy.drop()
        assert not any(scene.loaded())
        scene.proxy.spoil = intact
        scene.proxy.drop()
        assert scene.recovered()


@pytest.mark.parametrize("period", [300, 20_000, 100_000])
def test_replies_with_flipped_bits_are_misses(scene: Scene, period: int) -> None:
    results = []
    for seed in range(4):
        scene.proxy.spoil = flip_every(period, seed)
        scene.proxy.drop()
        results += scene.loaded()
    assert not all(results), "the proxy has spoiled nothing"
    scene.proxy.spoil = intact
    scene.proxy.drop()
    assert scene.recovers()


def test_connections_that_break_are_made_again(scene: Scene) -> None:
    """A broken connection is detected at once, so there is time to try again."""
    for _ in range(5):
        scene.proxy.drop()
        assert scene.recovered()


def test_a_silent_store_opens_the_breaker_which_closes_after_recovery(scene: Scene) -> None:
    scene.proxy.flowing.clear()
    assert not any(scene.loaded())
    assert state(scene.tier) != 0
    begun = time.monotonic()
    for _ in range(200):
        assert not any(scene.loaded())
        assert not scene.saves_all()
    assert time.monotonic() - begun < 200 * SETTINGS.operation_s / 10
    scene.proxy.flowing.set()
    assert scene.recovered()


def test_a_store_that_trickles_costs_one_deadline(scene: Scene) -> None:
    """No byte of a response takes as long as the timeout, but the whole response does."""

    def drip(data: bytes, before: int) -> bytes:
        time.sleep(0.3)
        return data

    scene.proxy.spoil = drip
    big_records, big = blocks([3 << 20], seed=5)
    begun = time.monotonic()
    scene.tier.save(big_records, big)
    hits = same(scene.tier.load(big_records["key"]), big_records, big)
    assert time.monotonic() - begun < SETTINGS.save_s + SETTINGS.load_s + 10
    assert len(hits) == 1
    scene.proxy.spoil = intact
    scene.proxy.drop()
    assert scene.recovered()


@pytest.mark.parametrize("status", [403, 500, 503])
def test_an_error_reply_is_a_miss(s3: tuple[FakeS3, Stored], status: int) -> None:
    server, stored = s3
    server.status = status
    assert not any(stored.loaded())
    assert not stored.tier.save(*blocks([100] * 5, seed=1)).any()
    # 403 shows that the store is available, and 5xx that it is not.
    assert (state(stored.tier) == 0) == (status == 403)
    server.status = 0
    assert stored.recovered()
    assert stored.tier.remove(stored.records["key"]) == 5
    assert not server.objects


@pytest.mark.parametrize(("status", "is_of_one"), [(400, True), (413, True), (429, False)])
def test_a_rejected_object_does_not_stop_others(
    s3: tuple[FakeS3, Stored], status: int, is_of_one: bool
) -> None:
    server, stored = s3
    server.put_status = status
    for seed in range(1, 4):
        assert not stored.tier.save(*blocks([100] * 5, seed=seed)).any()
    assert (state(stored.tier) == 0) == is_of_one
    if is_of_one:
        assert all(stored.loaded())


def test_a_folder_that_vanishes_or_cannot_be_read_is_a_miss(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    tier = open_remote(f"file://{tmp_path}/blocks", settings=SETTINGS)
    stored = Stored(tier, [100] * 5)
    (tmp_path / "blocks").rename(tmp_path / "elsewhere")
    (tmp_path / "blocks").write_text("no folder")
    assert not any(stored.loaded())
    assert not tier.save(*blocks([100] * 5, seed=1)).any()
    assert state(tier) == 0
    (tmp_path / "blocks").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "blocks")
    assert all(stored.loaded())
    tier.close()


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.go_on()
    server.kill()


@pytest.mark.slow
def test_a_stopped_redis_costs_one_deadline(redis: RedisServer) -> None:
    settings = RemoteSettings(operation_s=2, load_s=4, open_s=0.5, open_limit_s=0.5)
    with contextlib.closing(open_remote(redis.url, settings=settings)) as tier:
        stored = Stored(tier, [100_000] * 16)
        redis.stop()
        assert not any(stored.loaded())
        assert state(tier) != 0
        begun = time.monotonic()
        for _ in range(100):
            assert not any(stored.loaded())
        assert time.monotonic() - begun < settings.operation_s, "they did not wait"
        redis.go_on()
        assert stored.recovered()


@pytest.mark.slow
def test_a_restarted_redis_is_used_again(redis: RedisServer) -> None:
    with contextlib.closing(open_remote(redis.url, settings=SETTINGS)) as tier:
        stored = Stored(tier, [100_000] * 16)
        redis.kill()
        for _ in range(10):
            assert not any(stored.loaded())
        redis.start()
        assert eventually(stored.saves_all, 60)
        assert all(stored.loaded())


@pytest.mark.slow
def test_a_full_redis_serves_its_blocks() -> None:
    server = RedisServer("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    tier = open_remote(server.url, settings=SETTINGS)
    records, payload = blocks([500_000] * 30)
    saved = tier.save(records, payload)
    assert 0 < saved.sum() < 30
    assert state(tier) == 0
    loaded = same(tier.load(records["key"]), records, payload)
    assert loaded == saved.tolist()
    tier.close()
    server.kill()


@pytest.mark.slow
def test_a_value_of_another_type_is_a_miss_until_it_is_saved_again(redis: RedisServer) -> None:
    import redis as client

    tier = open_remote(redis.url, settings=SETTINGS)
    records, payload = blocks([1000])
    assert tier.save(records, payload).all()
    other = client.Redis(port=redis.port)
    (name,) = other.keys()
    other.delete(name)
    other.lpush(name, "not", "a", "block")
    assert tier.load(records["key"]) == [None]
    assert state(tier) == 0
    assert tier.save(records, payload).all()
    assert same(tier.load(records["key"]), records, payload) == [True]
    other.close()
    tier.close()


FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
SEEN = {
    "saved by another": 10,
    "loaded": [True] * 10,
    "missing": [False] * 3,
    "saved": [True] * 3,
    "loaded others": [True] * 3,
    "state": 0,
    "wrong": True,
    "replaced": [True],
    "right again": [True],
    "removed": 3,
    "after that": [False] * 3,
    "before": True,
    "stopped": 0,
    "at once": True,
    "open": True,
    "back": True,
    "killed": 0,
    "open again": True,
}


def need_namespace() -> list[str]:
    """Return the words that run a command in a network namespace of its own, or skip the test."""
    command = ["unshare", "--net", "--pid", "--fork", "--kill-child"]
    if os.geteuid():
        command += ["--user", "--map-root-user"]
    if not shutil.which("unshare") or subprocess.run([*command, "true"], check=False).returncode:
        pytest.skip("no network namespace can be made here")
    return command


@pytest.mark.slow
def test_two_racks_share_a_mooncake_store_that_stops_and_dies(tmp_path: Path) -> None:
    unshare = need_namespace()
    setup = subprocess.run(
        [ROOT / "scripts/dev/setup-mooncake"], stdout=subprocess.PIPE, text=True, check=False
    )
    if setup.returncode:
        pytest.skip("Mooncake Store cannot be installed here")
    packages = Path(setup.stdout.strip())
    ran = captured(
        [*unshare, sys.executable, FOLDER / "mooncake_scene.py", tmp_path, packages / "bin"],
        env={**os.environ, "PYTHONPATH": f"{FOLDER}:{FOLDER.parent}:{packages}"},
        timeout=250,
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("seen ")]
    assert lines, ran.stderr[-5000:]
    assert json.loads(lines[0].removeprefix("seen ")) == SEEN


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("mooncake://master", "mooncake://HOST:PORT"),
        ("mooncake://master:1?segment=1", "no option segment"),
        ("mooncake://master:1?buffer=1GiB", "a number of bytes"),
    ],
)
def test_an_invalid_url_of_mooncake_is_a_one_line_error(
    url: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = type(sys)("mooncake.store")
    package.MooncakeDistributedStore = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", type(sys)("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", package)
    with pytest.raises(TierError, match=reason):
        open_remote(url)
