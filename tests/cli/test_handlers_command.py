# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The commands that serve, list and call a program's handlers."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.commands import captured
from support.prometheus_lint import complaints

from beluga import Client, KVCache, Pool
from tests.exporter.scraped import raw, scrape

Begin = Callable[..., "subprocess.Popen[str]"]
RunCommand = Callable[..., "subprocess.CompletedProcess[str]"]

MODULE = '''
from dataclasses import dataclass
import numpy as np
from beluga import Handlers

handlers = Handlers()

@dataclass
class Order:
    item: str
    count: int = 1

@handlers.add
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b

@handlers.add
def shout(text: str) -> str:
    return text.upper()

@handlers.add
def reverse(data: bytes) -> bytes:
    return data[::-1]

@handlers.add
def norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values))

@handlers.add
def price(order: Order) -> dict[str, float]:
    return {order.item: 2.5 * order.count}

def plain(n: int) -> int:
    return n

several = [plain, shout]
named = {"first": plain}
nothing = 3
'''


LONG = pytest.mark.long


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    program = tmp_path / "program"
    program.mkdir()
    (program / "jobs.py").write_text(MODULE)
    return program


@pytest.fixture
def begin(start: Begin, folder: Path) -> Begin:
    """Start a command in the folder of the program."""
    return partial(start, entry="cxl_rpc", cwd=folder)


@pytest.fixture
def run_command(run: RunCommand, folder: Path) -> RunCommand:
    """Run a command to its end."""
    return partial(run, entry="cxl_rpc", cwd=folder)


def serves(child: subprocess.Popen[str]) -> None:
    assert child.stderr is not None
    assert child.stderr.readline().startswith("serving, epoch 1")


def test_handlers_of_a_module_are_served_listed_and_called(
    begin: Begin, run_command: RunCommand, pool: list[str]
) -> None:
    serves(begin("serve", "jobs:handlers", *pool, "--handler-threads", "2"))
    assert run_command("list", *pool).stdout.splitlines() == [
        "add(a: int, b: int = ...) -> int  Add two numbers.",
        "norm(values: numpy.ndarray) -> float",
        "price(order: Order) -> dict[str, float]",
        "reverse(data: bytes) -> bytes",
        "shout(text: str) -> str",
    ]
    listed = json.loads(run_command("list", *pool, "--json").stdout)
    assert listed[0] == {
        "name": "add",
        "parameters": {"a": "int", "b": "int"},
        "optional": ["b"],
        "returns": "int",
        "help": "Add two numbers.",
    }
    for words, result in (
        (("add", "2", "40"), "42"),
        (("add", "2"), "3"),
        (("shout", "3"), "3"),
        (("shout", "Grüße"), "GRÜSSE"),
        (("norm", "[3, 4]"), "5.0"),
        (("price", '{"item": "tea", "count": 2}'), '{"tea":5.0}'),
        (("64", "raw"), "raw"),
    ):
        assert run_command("call", *words, *pool).stdout == result + "\n", words
    assert run_command("call", "reverse", "-", *pool, stdin="abc").stdout == "cba\n"
    whole = json.loads(run_command("call", "add", "1", *pool, "--json").stdout)
    assert whole == {"handler": "add", "result": 2}


def test_other_modules_in_the_handlers_folder_are_not_imported(
    folder: Path, pool: list[str]
) -> None:
    (folder / "numpy.py").write_text(
        "raise SystemExit('a file of the current folder was imported')"
    )
    code = "from beluga.cli.main import cxl_rpc; cxl_rpc()"
    ended = captured([sys.executable, "-I", "-c", code, "serve", "jobs:nothing", *pool], cwd=folder)
    assert "jobs:nothing is 3" in ended.stderr


def test_an_invalid_call_prints_one_line_and_sets_the_exit_status(
    begin: Begin, run_command: RunCommand, pool: list[str]
) -> None:
    serves(begin("serve", "jobs:handlers", *pool))
    for words, code, text in (
        (("nothing",), 1, "no handler 'nothing'; it has add, norm"),
        (("add", "two"), 2, "'two' is not a valid int in JSON"),
        (("add", "1.5"), 2, "add: a is 1.5; give int"),
        (("add", "1", "2", "3"), 2, "too many positional arguments; its signature is add(a: int"),
        (("price", '{"count": 1}'), 2, "is not a valid Order"),
        (("200",), 1, "no handler for this method"),
        (("64", "a", "b"), 2, "a method takes one argument"),
    ):
        ended = run_command("call", *words, *pool)
        assert ended.returncode == code, words
        assert text in " ".join(ended.stderr.split()), words
        assert "Traceback" not in ended.stderr


def test_beluga_serve_has_handlers_in_addition_to_the_index(
    begin: Begin, run_command: RunCommand, pool: list[str]
) -> None:
    serves(begin("serve", "--handlers", "jobs:several", *pool, entry="main"))
    with Pool.open(pool[1::2]) as opened, Client(opened) as client:
        assert client.call("shout", "a", returns=str) == "A"
        with KVCache(client, namespace="x") as cache:
            cache.put([b"k" * 16], [b"bytes"])
            assert int(cache.lookup([b"k" * 16])) == 1
    assert run_command("call", "plain", "7", *pool).stdout == "7\n"


def test_a_background_server_serves_handlers(run_command: RunCommand, pool: list[str]) -> None:
    detached = run_command("serve", "--detach", "--handlers", "jobs:named", *pool, entry="main")
    assert detached.returncode == 0, detached.stderr
    try:
        assert run_command("call", "first", "7", *pool).stdout == "7\n"
    finally:
        run_command("stop", *pool, entry="main")


def test_lanes_are_served_in_the_background(run_command: RunCommand, pool: list[str]) -> None:
    """A pasted page calls a handler right after this command."""
    detached = run_command("serve", "--detach", "jobs:handlers", *pool)
    assert detached.returncode == 0, detached.stderr
    path = pool[1]
    assert f"stop it with 'beluga stop --pool {path}" in detached.stderr
    try:
        assert run_command("call", "add", "7", *pool).stdout == "8\n"
    finally:
        assert run_command("stop", *pool, entry="main").returncode == 0
    refused = run_command("serve", "--detach", "jobs:other", *pool)
    assert refused.returncode == 2
    assert refused.stderr.startswith("cxl-rpc: error: module jobs has no attribute other; give ")


def test_a_server_without_handlers_returns_an_error_with_a_fix(
    begin: Begin, run_command: RunCommand, pool: list[str]
) -> None:
    serves(begin("serve", *pool))
    for words in (("list",), ("call", "add", "1")):
        ended = run_command(*words, *pool)
        assert ended.returncode == 1
        assert "'cxl-rpc serve MODULE:NAME'" in ended.stderr


@pytest.mark.parametrize(
    ("handlers", "text"),
    [
        ("jobs", "'jobs' does not name handlers; give MODULE:NAME, such as jobs:handlers"),
        pytest.param("../jobs:handlers", "does not name handlers; give MODULE:NAME", marks=LONG),
        pytest.param("none:handlers", "there is neither a module none nor a file ", marks=LONG),
        pytest.param("jobs:other", "module jobs has no attribute other; give", marks=LONG),
        pytest.param(
            "jobs:nothing", "jobs:nothing is 3; give a Handlers or a list of functions", marks=LONG
        ),
        ("broken:handlers", "the module broken imports absent_package, which is not installed"),
        ("syntax:handlers", "the module syntax cannot be imported (SyntaxError: "),
        ("raises:handlers", "cannot be imported (ValueError: no luck, at "),
        pytest.param("exits:handlers", "cannot be imported (SystemExit: 3, at ", marks=LONG),
        pytest.param("coroutine:handlers", "but f is a coroutine function; remove", marks=LONG),
    ],
)
def test_handlers_that_cannot_be_loaded_are_reported_before_the_server_starts(
    folder: Path, run_command: RunCommand, pool: list[str], handlers: str, text: str
) -> None:
    (folder / "broken.py").write_text("import absent_package\n")
    (folder / "syntax.py").write_text("def f(:\n")
    (folder / "raises.py").write_text("raise ValueError('no\\nluck')\n")
    (folder / "exits.py").write_text("raise SystemExit(3)\n")
    (folder / "coroutine.py").write_text("async def f() -> int: ...\nhandlers = [f]\n")
    for words, entry in (
        (("serve", handlers), "cxl_rpc"),
        (("serve", "--handlers", handlers), "main"),
        (("serve", "--detach", "--handlers", handlers), "main"),
    ):
        ended = run_command(*words, *pool, entry=entry)
        assert ended.returncode == 2
        assert text in ended.stderr
        assert "Traceback" not in ended.stderr


def test_a_pool_is_made_with_room_for_long_calls(run_command: RunCommand, shm: Path) -> None:
    path = str(shm / "wide")
    ended = run_command(
        *("pool", "create", path, "--size", "64M", "--lanes", "2", "--bulk-size", "1M"),
        entry="main",
    )
    assert ended.returncode == 0, ended.stderr
    with Pool.open([path]) as opened:
        assert opened.geometry.bulk_size == 1 << 20


@pytest.mark.parametrize("entry", ["cxl_rpc", "main"])
def test_metrics_count_the_calls_of_each_handler(
    start: Begin, run_command: RunCommand, folder: Path, pool: list[str], entry: str
) -> None:
    """Beside the block index, and without it."""
    handlers = ["--handlers", "jobs:handlers"] if entry == "main" else ["jobs:handlers"]
    server = start("serve", *handlers, *pool, "--admin", "0", entry=entry, cwd=folder)
    assert server.stderr
    announced = server.stderr.readline()
    assert server.stderr.readline().startswith("serving, epoch 1")
    run_command("call", "add", "1", *pool)
    run_command("call", "add", '"one"', *pool)  # not an int
    run_command("call", "shout", "hello", *pool)
    run_command("call", "nothing", *pool)
    url = announced.split("metrics at ")[1].strip()
    assert announced.startswith("page at") == (entry == "main")
    scraped = scrape(url)
    calls = {
        handler: scraped.value("beluga_handler_calls_total", handler=handler)
        for handler in scraped.labels("beluga_handler_calls_total", "handler")
    }
    assert {name: calls[name] for name in ("add", "shout", "norm", "(unknown)")} == {
        "add": 2,
        "shout": 1,
        "norm": 0,
        "(unknown)": 1,
    }
    assert scraped.value("beluga_handler_errors_total", handler="add") == 1
    assert scraped.value("beluga_handler_errors_total", handler="shout") == 0
    assert scraped.value("beluga_handler_seconds_count", handler="add") == 2
    assert scraped.value("beluga_rpc_calls_total", method="function") >= 4
    assert scraped.value("beluga_server_serving") == 1
    assert complaints(raw(url)) == []
    ready = url.replace("metrics", "readyz")
    with urllib.request.urlopen(ready, timeout=60) as answer:  # noqa: S310
        assert answer.read() == b"serving\n"
