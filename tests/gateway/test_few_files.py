# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A gateway that runs out of file descriptors serves as many clients as possible, responds to the
others with the reason, and counts no engine failure.
"""

from __future__ import annotations

import asyncio
import errno
import json
import resource
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

import aiohttp
from announcer import Announcer
from fake_engine import FakeEngine
from routed import routed, run, until

from beluga.gateway.acceptor import raise_file_limit
from beluga.gateway.kv_events import Listener
from beluga.open_files import files_left
from beluga.router import Indexer, WireDecoder

FILES = 64
CLIENTS = 120
WHOLE = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"


def addresses(child: Any) -> tuple[str, str]:
    """Return where a started ``beluga gateway`` listens for clients and for operators."""
    for line in child.stderr:
        if line.startswith("routing on "):
            words = line.split()
            return words[2].rstrip(";"), words[5].rstrip(";")
    raise AssertionError("it ended")


def health(admin: str) -> str:
    with urllib.request.urlopen(f"{admin}/workers", timeout=60) as answer:  # noqa: S310
        return str(json.load(answer)[0]["health"])


FEW = """
import asyncio, errno, os, resource, sys
from pathlib import Path
from beluga.errors import RouterError
from beluga.gateway.kv_events import Listener
from beluga.gateway.kv_events import PoolListener
from beluga.router import Indexer, WireDecoder

EVENTS, REPLAY = "ipc:///nowhere/e", "ipc:///nowhere/r"


indexer = Indexer()
decoder = WireDecoder(1, block_size=16, hash_blocks=lambda *_: [])


async def main():
    opened = len(os.listdir("/proc/self/fd"))
    loop = asyncio.get_running_loop()
    attempts = [
        lambda: Listener(indexer, decoder, EVENTS, REPLAY),
        lambda: PoolListener(indexer, f"{EVENTS},{REPLAY}", block_size=16),
    ]
    for left in range(11):
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened + left, 1024))
        for attempt in attempts:
            try:
                attempt()
            except RouterError as error:
                assert "open files, but only" in str(error), error
            else:
                raise AssertionError(f"{left} files were enough")
    print("refused")


import zmq, zmq.asyncio  # which takes files
asyncio.run(main())
"""


def test_too_few_files_for_kv_events_are_an_error_and_abort_nothing() -> None:
    """libzmq aborts the process if it cannot open a file for a thread or a socket."""
    pytest.importorskip("zmq", reason="pyzmq is not installed")
    ended = subprocess.run([sys.executable, "-c", FEW], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "refused\n", "")


def test_a_listener_needs_no_more_files_than_are_required_of_it(tmp_path: Path) -> None:
    announcer = Announcer(tmp_path)

    async def scenario() -> None:
        before = files_left()
        decoder = WireDecoder(1, block_size=16, hash_blocks=lambda *_: [])
        listener = Listener(Indexer(), decoder, announcer.events, announcer.replay)
        try:
            await until(lambda: listener.alone_since is None and announcer.subscribed())
            assert before - files_left() <= 11 + 2  # the announcer's ends of the connections
        finally:
            listener.close()

    try:
        run(scenario)
    finally:
        announcer.close()


@pytest.mark.parametrize("feeds", [0, 3])
async def test_clients_beyond_the_file_limit_get_an_error_and_others_are_served(
    start: Callable[..., Any], tmp_path: Path, feeds: int
) -> None:
    """Each feed of KV events needs about 11 descriptors, which are then not available for
    clients.
    """
    if feeds:
        pytest.importorskip("zmq", reason="pyzmq is not installed")
    files = FILES + 12 * feeds
    engine = FakeEngine()
    engine.faults.hold = asyncio.Event()
    connector = aiohttp.TCPConnector(limit=0)
    async with engine, aiohttp.ClientSession(connector=connector) as client:
        child = start(
            *("gateway", "--worker", engine.url, "--port", 0, "--admin", "127.0.0.1:0"),
            *("--health-interval", 0.1, "--policy", "linear"),
            *(
                word
                for number in range(feeds)
                for word in (
                    "--kv-events",
                    f"{engine.url}=ipc://{tmp_path}/e{number},ipc://{tmp_path}/r{number}",
                )
            ),
        )
        resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (files, files))
        base, admin = await asyncio.to_thread(addresses, child)
        while await asyncio.to_thread(health, admin) != "up":
            await asyncio.sleep(0.02)

        async def complete() -> tuple[int, bytes]:
            body = {"model": "fake", "prompt": "a", "stream": True}
            while True:
                try:
                    async with client.post(f"{base}/v1/completions", json=body) as answer:
                        return answer.status, await answer.read()
                except aiohttp.ClientConnectionError:
                    # closed before it had sent anything, to make room for another connection
                    pass

        clients = [asyncio.create_task(complete()) for _ in range(CLIENTS)]
        await until(lambda: engine.under_way + sum(c.done() for c in clients) == CLIENTS)
        served = engine.under_way
        assert FILES / 5 < served < FILES / 2  # the event loop uses some descriptors, too
        assert await asyncio.to_thread(health, admin) == "up"
        engine.faults.hold.set()
        answers = await asyncio.gather(*clients)
        assert Counter(status for status, _ in answers) == {
            200: served,
            503: CLIENTS - served,
        }
        for status, body in answers:
            whole = body.endswith(b"data: [DONE]\n\n")
            assert whole if status == 200 else b"open files allows; raise it (ulimit -n)" in body
        for _ in range(FILES):
            assert (await complete())[0] == 200
        assert await asyncio.to_thread(health, admin) == "up"


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n", WHOLE])
async def test_idle_connections_do_not_block_others(start: Callable[..., Any], sent: bytes) -> None:
    async def while_others_idle(base: str) -> None:
        async with aiohttp.ClientSession() as client:
            host, port = base.removeprefix("http://").split(":")
            idle = [await asyncio.open_connection(host, int(port)) for _ in range(FILES)]
            for _, writer in idle:
                writer.write(sent)
            body = {"model": "fake", "prompt": "a"}
            for _ in range(3):
                async with client.post(f"{base}/v1/completions", json=body) as answer:
                    assert answer.status == 200
            for _, writer in idle:
                writer.close()

    async with FakeEngine() as engine, aiohttp.ClientSession() as client:
        child = start(
            *("gateway", "--worker", engine.url, "--port", 0, "--admin", "127.0.0.1:0"),
            *("--health-interval", 0.1),
        )
        resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
        base, admin = await asyncio.to_thread(addresses, child)
        while await asyncio.to_thread(health, admin) != "up":
            await asyncio.sleep(0.02)
        engine.faults.hold = asyncio.Event()
        body = {"model": "fake", "prompt": "a"}
        url = f"{base}/v1/completions"
        async with client.post(url, json={**body, "stream": True}) as stream:
            await while_others_idle(base)
            engine.faults.hold.set()
            assert (await stream.read()).endswith(b"data: [DONE]\n\n")


async def test_exhausted_descriptors_of_the_gateway_are_not_an_engine_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with routed(FakeEngine()) as site:
        (engine,) = site.service.fleet
        failed = 0
        connect = aiohttp.TCPConnector.connect

        async def starved(self: Any, request: Any, **more: Any) -> Any:
            nonlocal failed
            if str(request.url).startswith(engine.url):
                failed += 1
                error = OSError(errno.EMFILE, "Too many open files")
                raise aiohttp.ClientConnectorError(request.connection_key, error)
            return await connect(self, request, **more)

        with monkeypatch.context() as patched:
            patched.setattr(aiohttp.TCPConnector, "connect", starved)
            status, body = await site.completed()
            assert status == 503
            assert b"this router cannot open a connection" in body
            await until(lambda: failed > 3)  # also by health checks
        assert (engine.serving, engine.failures) == (True, 0)
        assert (await site.completed())[0] == 200
        assert site.loads() == [(0, 0)]


def test_the_limit_of_open_files_is_raised_to_the_hard_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] // 2, before[1]))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
