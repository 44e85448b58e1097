# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Stored responses are requested from the engine that created them; browsers may read the router's
own responses.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

from fake_engine import FakeEngine
from routed import Site, routed, until

from beluga.gateway.director import Responses
from beluga.gateway.parsed_request import response_of

ORIGIN = {"Origin": "http://a.example"}


def test_the_last_responses_are_stored() -> None:
    known = Responses(limit=2)
    for number in range(3):
        known.made(b'{"id":"resp_%d","object":"response"}' % number, number)
    known.made(b'data: {"type": "response.created", "response": {"id": "resp_1"}}\n\n', 7)
    known.made(b'{"id":"chatcmpl-1"}', 8)
    assert [known.worker_of(f"resp_{number}") for number in range(3)] == [None, 7, 2]
    assert known.worker_of(None) is None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/responses/resp_1", "resp_1"),
        ("/v1/responses/resp_1/cancel", "resp_1"),
        ("/v1/responses", None),
        ("/v1/responses/", None),
        ("/v1/completions", None),
    ],
)
def test_paths_name_a_response(path: str, name: str | None) -> None:
    assert response_of(path) == name


async def made(site: Site, *, stream: bool, **more: Any) -> tuple[str, str]:
    """Have a response made. Returns its name, and the engine that made it."""
    requested = {"model": "fake", "input": "hello", "stream": stream, **more}
    async with site.client.post(f"{site.base}/v1/responses", json=requested) as answer:
        assert answer.status == 200, await answer.text()
        text = await answer.text()
    found = json.loads(text.split("data: ", 1)[1])["response"] if stream else json.loads(text)
    return found["id"], found["at"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_request_for_a_response_goes_to_the_engine_that_made_it(stream: bool) -> None:
    async with routed(*(FakeEngine() for _ in range(3))) as site:
        names = [await made(site, stream=stream) for _ in range(6)]
        assert len({url for _, url in names}) == 3
        for name, url in names:
            for method, path in (("GET", name), ("POST", f"{name}/cancel")):
                place = f"{site.base}/v1/responses/{path}"
                async with site.client.request(method, place) as answer:
                    assert answer.status == 200
                    assert (await answer.json())["at"] == url
            next_one = await made(site, stream=stream, previous_response_id=name)
            assert next_one[1] == url
        async with site.client.get(f"{site.base}/v1/responses/resp_unknown") as answer:
            assert answer.status == 404
            assert "resp_unknown not found" in await answer.text()
        assert site.inflight() == 0


async def test_a_request_for_a_response_of_a_dead_engine_is_not_rerouted() -> None:
    first, second = FakeEngine(), FakeEngine()
    async with routed(first, second) as site:
        at = {url: name for name, url in [await made(site, stream=False) for _ in range(2)]}
        name = at[first.url]
        first.faults.healthy = False
        await until(lambda: [e.serving for e in site.service.fleet].count(True) == 1)
        async with site.client.get(f"{site.base}/v1/responses/{name}") as answer:
            assert answer.status == 503


async def test_responses_of_the_router_have_cors_headers() -> None:
    async with routed(FakeEngine(), FakeEngine("other")) as site:
        for path, status in (("models", 200), ("models/fake", 200), ("models/none", 404)):
            async with site.client.get(f"{site.base}/v1/{path}", headers=ORIGIN) as answer:
                assert answer.status == status
                assert answer.headers["Access-Control-Allow-Origin"] == "*"
            async with site.client.get(f"{site.base}/v1/{path}") as answer:
                assert "Access-Control-Allow-Origin" not in answer.headers
        requested = ORIGIN | {"Access-Control-Request-Method": "POST"}
        place = f"{site.base}/v1/completions"
        async with site.client.options(place, headers=requested) as answer:
            assert answer.status == 405  # the fake engine's own error: it supports no preflight
