# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Every usual spelling of a store's endpoint over http reaches the store, and no client panics."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from beluga.errors import TierError
from beluga.tiers.remote import RefusedError, RemoteSettings, check_remote, store_name
from beluga.tiers.remote.objects import ClientPanicError, ObstoreStore, no_panic

pytest.importorskip("obstore", reason="obstore is not installed")

SETTINGS = RemoteSettings(operation_s=20, load_s=40, save_s=40)
DATA = b"an object"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
S3 = "access_key_id=a&secret_access_key=b"
AZ = f"account_name=devstoreaccount1&account_key={KEY.replace('+', '%2B')}"


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
    here, paths = store
    for name, value in environment.items():
        monkeypatch.setenv(name, value.replace("HERE", here))
    made = ObstoreStore(urlsplit(url.replace("HERE", here)), SETTINGS)
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

    made = ObstoreStore(urlsplit(f"s3://bucket/p?endpoint=http://{store[0]}&{S3}"), SETTINGS)
    for name in ("get", "put", "head", "delete"):
        monkeypatch.setattr(made._obstore, name, panic)
    for work in (
        lambda: made.get("a"),
        lambda: made.put("a", memoryview(b"")),
        lambda: made.exists(["a"]),
    ):
        with pytest.raises(RefusedError, match="index out of bounds"):
            work()
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
    here = store_name(f"s3://bucket/p?endpoint=http://here:9000&{S3}")
    assert here.startswith("s3://bucket/p ")
    assert store_name("s3://bucket/p") == "s3://bucket/p"
    assert here == store_name("s3://bucket/p?aws_endpoint_url=http://HERE:9000/&access_key_id=new")
    assert here != store_name(f"s3://bucket/p?endpoint=http://there:9000&{S3}")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://here:9000")
    assert store_name("s3://bucket/p") == here
    assert store_name("az://c?account_name=a") != store_name("az://c?account_name=b")
    assert store_name("redis://user:secret@cache/3") == "redis://cache/3"
    with pytest.raises(TierError, match="write http://HOST:PORT"):
        store_name("s3://bucket/p?endpoint=nowhere")
