# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The names of workers, on the command line and in a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

from click.testing import CliRunner

from beluga.cli.app import app
from beluga.cli.gateway import gateway
from beluga.errors import RouterError
from beluga.gateway import (
    Address,
    EngineSpec,
    Settings,
    read_engines,
)
from beluga.gateway.cache import Cache
from beluga.gateway.fleet import read_workers, workers_text
from beluga.gateway.metrics import Metrics
from beluga.gateway.settings import read_url
from beluga.simulate import Options


def test_engine_options_have_an_optional_model() -> None:
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
    [
        *("", "a:1", "ftp://a", "http://", "http://a:x", "http://a:0", "http://a?b"),
        *(
            "http://a:b@c:1",
            "http://a:99999",
            "http://[::1",
            "http://[a]:1",
            "http://\N{ACCOUNT OF}:1",
        ),
    ],
)
def test_an_invalid_url_is_rejected(url: str) -> None:
    with pytest.raises(RouterError, match="URL"):
        read_url(url)


def test_invalid_choices_are_rejected() -> None:
    for workers, models, events in (
        ((), ("m",), ()),
        ((), ("=http://a",), ()),
        ((), ("m=",), ()),
        (("http://a",), (), ("http://a",)),
        (("http://a",), (), ("http://b=tcp://c",)),
        (("http://a",), (), ("http://a=tcp://c", "http://a/=tcp://c,tcp://d")),
    ):
        with pytest.raises(RouterError):
            read_engines(workers, models, events)


def test_each_rank_of_an_engine_may_have_an_endpoint(tmp_path: Path) -> None:
    [engine] = read_engines(
        ["http://a:1"], (), ["http://a:1=tcp://a:5,tcp://a:6", "http://a:1/=tcp://a:7"]
    )
    others = (("tcp://a:7", None),)
    assert engine == EngineSpec("http://a:1", (), "tcp://a:5", "tcp://a:6", others)
    assert engine.feeds == (("tcp://a:5", "tcp://a:6"), ("tcp://a:7", None))
    assert EngineSpec("http://a:1").feeds == ()
    path = tmp_path / "workers"
    path.write_text("http://a:1 events=tcp://a:5 replay=tcp://a:6 events=tcp://a:7")
    assert read_workers(workers_text(path), path) == (engine,)


def test_each_line_of_a_file_is_a_worker(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_text(
        "\n# all of ours\nhttp://a:1 model=m model=n # first\nhttp://b:2 events=ipc:///e\n"
    )
    assert read_workers(workers_text(path), path) == (
        EngineSpec("http://a:1", ("m", "n")),
        EngineSpec("http://b:2", (), "ipc:///e"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://a\nnonsense\n", "line 2: 'nonsense'"),
        ("http://a weight=3\n", "line 1: 'weight=3' is not one of"),
        ("http://a\nhttp://a/\n", "line 2: http://a occurs twice"),
        ("\x00", "line 1"),
        ("http://a replay=tcp://a:6", "line 1: 'replay=tcp://a:6' must follow the events="),
        ("http://a events=b replay=c replay=d", "'replay=d' must follow the events="),
        ("http://a events=b events=b", "the KV events of http://a at b are configured twice"),
    ],
)
def test_an_invalid_file_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "workers"
    path.write_text(text)
    with pytest.raises(RouterError, match=message):
        read_workers(workers_text(path), path)


def test_addresses_may_be_ipv6() -> None:
    assert Address.parse("[::1]:80") == Address("::1", 80)
    for text in ("80", ":80", "a:b", "a:70000"):
        with pytest.raises(RouterError):
            Address.parse(text)


def test_the_command_and_the_settings_have_the_same_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests: list[Settings] = []

    async def serve(settings: Settings, started: Callable[..., None]) -> None:
        requests.append(settings)

    monkeypatch.setattr("beluga.gateway.serve", serve)
    gateway(worker=["http://a:1"])
    assert requests == [Settings(engines=(EngineSpec("http://a:1"),), seed=0)]


def started(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[list[Settings], str]:
    """Run the command. Returns the settings that it starts with, and what it prints."""
    requests: list[Settings] = []

    async def serve(settings: Settings, started: Callable[..., None]) -> None:
        requests.append(settings)

    monkeypatch.setattr("beluga.gateway.serve", serve)
    monkeypatch.setenv("COLUMNS", "200")
    done = CliRunner().invoke(app, ["gateway", "--worker", "http://a:1", *arguments])
    return requests, done.output + str(done.exception or "")


def test_times_are_estimated_like_in_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Options()
    for arguments, options in (
        ((), usual),
        (("--gpu-path", "switch"), Options(gpu_path="switch")),
        (
            ("--bandwidth", "11", "--local-bandwidth", "22", "--step-tokens", "2048"),
            Options(bandwidth=11e9, local_bandwidth=22e9, step_tokens=2048),
        ),
    ):
        [requested], _ = started(monkeypatch, *arguments)
        estimator = requested.estimator
        assert estimator.bytes_per_s == options.path_speed
        assert estimator.host_bytes_per_s == options.local_bandwidth
        assert estimator.step_tokens == options.step_tokens
        assert estimator.costs == options.model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--bandwidth", "0"), "--bandwidth is 0.0, but must be greater than 0"),
        (("--bandwidth", "inf"), "--bandwidth is inf; give a finite number"),
        (("--local-bandwidth", "-1"), "--local-bandwidth is -1"),
        (
            ("--policy", "round-robin:decay=1"),
            "policy round-robin has no setting 'decay'; it has no",
        ),
        (("--policy", "lmetric:credit=-1"), "credit of policy lmetric is -1; give 0 or more; its"),
        (("--gpu-path", "x"), "--gpu-path is 'x'; give one of root-complex, switch"),
        (("--step-tokens", "0"), "--step-tokens"),
        (("--block-size", "1000000000"), "--block-size"),
        (("--index-ranks", "1024"), "--index-ranks"),
        (("--body-wait", "0"), "--body-wait"),
        (("--allow-origin", "chat.example"), "--allow-origin chat.example is not an origin"),
        (("--allow-origin", "https://a/b"), "--allow-origin https://a/b is not an origin"),
    ],
)
def test_numbers_out_of_range_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    requested, printed = started(monkeypatch, *arguments)
    assert requested == []
    assert message in printed


def test_a_policy_is_given_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    [requested], _ = started(monkeypatch, "--policy", "linear:shared_credit=1,decay=2")
    assert requested.policy == "linear:shared_credit=1,decay=2"
    [requested], _ = started(monkeypatch, "--policy", "default")
    assert requested.policy == "least-cost"


def test_an_unknown_block_size_is_rejected() -> None:
    def cache(size: int) -> Cache:
        return Cache(
            wanted=True,
            block_size=size,
            announced=False,
            is_adapter=lambda _: False,
            space_of=lambda _: None,
            metrics=Metrics(),
        )

    with pytest.raises(RouterError, match="block_size is 65537, but must be at most 65536"):
        cache(65537)
    learning = cache(0)
    assert learning.learn(10**15) is None
    assert learning.learn(32) is not None
    assert learning.learn(16) is None
