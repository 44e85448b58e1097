# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Which paths of an engine a writer to a prefill queue reaches, and whether a queue's server, or a
man in the middle, gets its password.
"""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

pytest.importorskip("nats", reason="nats-py is not installed")

import msgspec

from beluga.disagg import PATHS, PrefillTask, open_queue
from beluga.disagg.queue import decode_task, encode_task
from beluga.errors import BadValueError, QueueError
from beluga.listening import shown_url

WORD = "hunter2hunter2"


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/load_lora_adapter", "/v1/../collective_rpc", "/v1/%2e%2e/sleep", "/sleep"),
        *(
            "/v1/completions/",
            "/v1/completions/../../sleep",
            "/v1//completions",
            "/v1/completions?a",
        ),
        *("/v1/responses", "http://other/v1/completions", "@other/v1/completions", ""),
    ],
)
def test_a_task_reaches_no_other_path_of_an_engine(path: str) -> None:
    task = PrefillTask(request_id="a", model="m", text="t", path=path)
    with pytest.raises(QueueError, match="a task's path is"):
        decode_task(msgspec.msgpack.encode(task))
    with pytest.raises(QueueError, match="a task's path is"):
        encode_task(task)


@pytest.mark.parametrize("path", PATHS)
def test_a_task_is_sent_only_to_paths_that_compute(path: str) -> None:
    task = PrefillTask(request_id="a", model="m", text="t", path=path)
    assert decode_task(encode_task(task)) == task


@pytest.mark.parametrize(
    "url",
    [
        f"nats://me:{WORD}@127.0.0.1:1",
        f"tls://me:{WORD}@127.0.0.1:1",
        f"nats://{WORD}@127.0.0.1:1",
        f"nats://me:{WORD}@127.0.0.1:1,nats://me:{WORD}@127.0.0.1:2",
        f"nats://me:{WORD}@127.0.0.1:port",
        f"nats://me:a/{WORD}@127.0.0.1:1",
        f"nats://me:a,{WORD}@127.0.0.1:1",
        f"nats://127.0.0.1:1/?token={WORD}",
        f"nats://127.0.0.1:1/?token=a@{WORD}",
        f"nats://me:a?{WORD}@127.0.0.1:1",
        f"nats://me:a#{WORD}@127.0.0.1:1",
        f"nats://me:{WORD}?a@127.0.0.1:1,nats://127.0.0.1:2",
        f"NATS://me:{WORD}@127.0.0.1:1",
        f"me:{WORD}@127.0.0.1:1",
        f"kafka://me:{WORD}@127.0.0.1:1",
        f"pool2:{WORD}@a",
    ],
)
def test_no_error_shows_a_queues_password(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises((QueueError, BadValueError)) as error:
        asyncio.run(open_queue(url, "q"))
    causes = f"{error.value}{error.value.__cause__}{error.value.__context__}"
    assert WORD not in causes + caplog.text
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("server", ["127.0.0.1:port", "127.0.0.1:99999", "a,nats://b:c"])
def test_an_invalid_nats_address_is_rejected_at_once(server: str) -> None:
    with pytest.raises(BadValueError, match="is not a NATS address; use nats://HOST:PORT"):
        asyncio.run(open_queue(f"nats://me:{WORD}@{server}", "q"))


def test_a_server_without_tls_does_not_get_the_password_of_a_tls_queue() -> None:
    """Nor does a man in the middle who removes TLS from the server's reply."""
    received: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = {"server_id": "a", "version": "2.10.0", "max_payload": 1 << 20, "headers": True}
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        while piece := await reader.read(4096):
            received.append(piece)
            writer.write(b"PONG\r\n" if b"PING" in piece else b"")
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(QueueError):
            await open_queue(f"tls://me:{WORD}@127.0.0.1:{port}", "q")
        assert WORD.encode() not in b"".join(received)
        server.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://host:4222", "nats://host:4222"),
        ("nats://a:b@host", "nats://host"),
        ("nats://a:b/c@host:1/d", "nats://host:1/d"),
        ("nats://a:b@c@host:1", "nats://host:1"),
        ("tls://t@one,tls://t@two?x=1", "tls://one,tls://two"),
        ("pool:/dev/shm/a:/dev/shm/b", "pool:/dev/shm/a:/dev/shm/b"),
        ("m=nats://a:b@host", "m=nats://host"),
        ("m=http://a:b@one:1,http://two:2", "m=http://one:1,http://two:2"),
        ("a:b@host:1", "host:1"),
        ("m=a:b@host:1", "m=host:1"),
        ("nats://a:b?c@host", "nats://..."),
        ("nats://a:b#c@host,nats://two", "nats://...,nats://two"),
        ("nats://host?a=b@c", "nats://..."),
        ("", ""),
    ],
)
def test_an_address_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert shown_url(url) == shown
