# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""How commands end, and the packages that they need."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import captured
from support.emulation import long
from support.leftovers import leftovers

from beluga.pool import emulated_paths

ROOT = Path(__file__).resolve().parent.parent.parent
Run = Callable[..., "subprocess.CompletedProcess[str]"]

WITHOUT = "import sys; sys.modules[{name!r}] = None; "


def python(code: str) -> subprocess.CompletedProcess[str]:
    return captured([sys.executable, "-c", code], cwd=ROOT)


@pytest.mark.parametrize("name", ["click", "rich", "msgspec"])
def test_a_missing_tool_is_named(name: str) -> None:
    ended = python(WITHOUT.format(name=name) + "from beluga.cli.main import main; main()")
    assert ended.returncode == 1
    assert ended.stderr == f"beluga: error: the commands need {name}; pip install beluga-kv\n"


@pytest.mark.parametrize("module", ["pool", "rpc", "index", "kvcache", "coherence"])
def test_the_library_needs_no_tools(module: str) -> None:
    without = "".join(WITHOUT.format(name=name) for name in ("click", "rich", "msgspec", "torch"))
    assert python(without + f"import beluga, beluga.{module}").returncode == 0


def test_a_lack_of_memory_is_one_line(pool: list[str]) -> None:
    """numpy raised MemoryError for a table that was as large as an option demanded."""
    code = (
        "from beluga.cli import ping, main; import numpy\n"
        "def run(*_, **__): numpy.zeros(1 << 60, numpy.uint8)\n"
        f"ping.open_pool = run; import sys; sys.argv[1:] = ['ping', *{pool!r}]; main.main()"
    )
    ended = python(code)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.count("\n") == 1
    assert "memory does not suffice (Unable to allocate" in ended.stderr


@pytest.mark.parametrize("use", ["_ffi.lib.bl_nothing", "_ffi.record_dtype('bl_nothing')"])
def test_a_core_of_other_sources_is_one_line(pool: list[str], use: str) -> None:
    code = (
        "from beluga import _ffi\nfrom beluga.cli import ping, main\n"
        f"def run(*_, **__): {use}\n"
        f"ping.open_pool = run; import sys; sys.argv[1:] = ['ping', *{pool!r}]; main.main()"
    )
    ended = python(code)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
    assert "the C core has no bl_nothing; it was built from other sources" in ended.stderr


def test_a_pipe_closed_during_output_causes_no_traceback(pool: list[str]) -> None:
    command = f"{sys.executable} -m beluga.cli.main pool info {' '.join(pool)} | true"
    ended = captured(["/bin/sh", "-c", command], cwd=ROOT)
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("command", [[], ["ping"], ["pool"], ["pool", "create"], ["simulate"]])
def test_dash_h_shows_help(run: Run, command: list[str]) -> None:
    short, long = run(*command, "-h"), run(*command, "--help")
    assert short.returncode == 0
    assert "Usage: " in short.stdout
    assert short.stdout == long.stdout


def completed(environment: dict[str, str], *words: str) -> str:
    """Return what the program prints for a shell's completion in these variables."""
    return captured(
        [sys.executable, "-m", "beluga.cli.main", *words], cwd=ROOT, env=os.environ | environment
    ).stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("beluga po", "pool"), ("beluga pool in", "info"), ("beluga put --na", "--namespace")],
)
@pytest.mark.parametrize("shell", ["bash", "zsh", long("fish")])
def test_shells_complete_commands_and_options(shell: str, typed: str, offered: str) -> None:
    words = {
        "COMP_WORDS": typed,
        "COMP_CWORD": typed.rsplit(maxsplit=1)[-1] if shell == "fish" else str(typed.count(" ")),
    }
    offers = completed({"_BELUGA_COMPLETE": f"{shell}_complete"} | words)
    assert offered in offers
    assert "create" not in offers
    assert shell == "bash" or len(offers.split()) > 3  # the help stands next to the name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_printed(shell: str) -> None:
    script = completed({"SHELL": f"/bin/{shell}"}, "--show-completion")
    assert f"_BELUGA_COMPLETE={shell}_complete" in script


def test_a_namespace_that_is_not_utf8_is_a_one_line_error(
    run: Run, pool: list[str], server: object
) -> None:
    refused = run("get", "key", *pool, "--namespace", os.fsdecode(b"\xff"))
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert "not UTF-8" in refused.stderr


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("rpc", "rpc c"),  # the other process answers
        long("bandwidth", "bandwidth read"),
        long("copy", "copy gather_write"),
    ],
)
def test_an_interrupted_benchmark_prints_no_traceback(name: str, begins: str) -> None:
    """Ctrl-C reaches every process of the terminal's group, the benchmark's children, too."""
    bench = subprocess.Popen(
        [sys.executable, "-m", "beluga.cli.main", "bench", name, "--smoke"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with bench:
        assert bench.stderr
        assert bench.stderr.readline().startswith(begins)
        time.sleep(0.1)  # now the threads are in C loops
        os.killpg(bench.pid, signal.SIGINT)
        output = bench.stderr.read()
    assert bench.returncode == 130
    assert "Traceback" not in output
    assert leftovers("bench", bench.pid) == set()


# ---- The README's shell block, pasted by a user with an empty home directory


README = (ROOT / "README.md").read_text()


def block_with(words: str, language: str) -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return next(block for block in blocks if words in block)


@pytest.fixture
def pasted(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell that has the commands, as after the installation."""
    program = tmp_path / "bin/beluga"
    program.parent.mkdir()
    code = "from beluga.cli.main import main; main()"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$@\"\n")
    program.chmod(0o755)
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("BELUGA_POOL")
    }
    return inherited | {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "PYTHONPATH": str(ROOT),
    }


def test_the_shell_block_works_when_pasted(pasted: dict[str, str], tmp_path: Path) -> None:
    folder = Path(emulated_paths()[0]).parent
    if folder.exists():
        pytest.skip(f"this user has an emulated pool in {folder}")
    lines = block_with("serve --detach", "shell").splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("beluga mount"))
    assert [line.split()[0] for line in lines[:first]] == ["python3", "pip"]
    ended = captured(
        ["/bin/sh", "-e"], input="\n".join(lines[first:]), cwd=tmp_path, env=pasted, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert "forty-two\n" in ended.stdout
    assert not folder.exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"bin", "state"}
