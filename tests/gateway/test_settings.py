# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The names of workers, on the command line and in a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

from beluga.cli.gateway import gateway
from beluga.errors import RouterError
from beluga.gateway import Address, EngineSpec, Settings, read_engines, read_workers_file
from beluga.gateway.settings import read_url


def test_engines_are_named_alone_or_by_model() -> None:
    assert read_engines(
        ["http://a:1/", "http://a:1/v1"],
        ["m=http://a:1,http://b:2", "n=http://b:2"],
        ["http://b:2=tcp://b:3,tcp://b:4"],
    ) == (
        EngineSpec("http://a:1", ("m",)),
        EngineSpec("http://b:2", ("m", "n"), "tcp://b:3", "tcp://b:4"),
    )


@pytest.mark.parametrize(
    "url",
    ["", "a:1", "ftp://a", "http://", "http://a:x", "http://a:0", "http://a?b", "http://a:99999"],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(RouterError, match="URL"):
        read_url(url)


def test_words_that_make_no_sense_are_refused() -> None:
    for workers, models, events in (
        ((), ("m",), ()),
        ((), ("=http://a",), ()),
        ((), ("m=",), ()),
        (("http://a",), (), ("http://a",)),
        (("http://a",), (), ("http://b=tcp://c",)),
    ):
        with pytest.raises(RouterError):
            read_engines(workers, models, events)


def test_a_file_has_a_worker_a_line(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_text(
        "\n# all of ours\nhttp://a:1 model=m model=n # first\nhttp://b:2 events=ipc:///e\n"
    )
    assert read_workers_file(path) == (
        EngineSpec("http://a:1", ("m", "n")),
        EngineSpec("http://b:2", (), "ipc:///e"),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("http://a\nnonsense\n", "line 2: 'nonsense'"),
        ("http://a weight=3\n", "line 1: 'weight=3' is none of"),
        ("http://a\nhttp://a/\n", "line 2: http://a is named twice"),
        ("\x00", "line 1"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "workers"
    path.write_text(text)
    with pytest.raises(RouterError, match=said):
        read_workers_file(path)


def test_addresses_may_be_of_version_6() -> None:
    assert Address.parse("[::1]:80") == Address("::1", 80)
    for text in ("80", ":80", "a:b", "a:70000"):
        with pytest.raises(RouterError):
            Address.parse(text)


def test_the_command_and_the_settings_have_the_same_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Settings] = []

    async def serve(settings: Settings, started: Callable[..., None]) -> None:
        asked.append(settings)

    monkeypatch.setattr("beluga.gateway.serve", serve)
    gateway(worker=["http://a:1"])
    assert asked == [Settings(engines=(EngineSpec("http://a:1"),), seed=0)]
