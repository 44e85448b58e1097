# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The parts of the vLLM benchmarks' harness that work without vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
from beluga_bench.vllm.model import SIZES, VOCABULARY
from beluga_bench.vllm.process import Child, ChildError, environment_of, options_of
from beluga_bench.vllm.prompts import prompt, prompts


def test_bytes_of_a_token_match_vllm() -> None:
    assert SIZES["mid"].token_bytes() == 24576
    assert SIZES["mid"].token_bytes(element_bytes=4) == 49152


def test_prompts_repeat_by_seed_and_share_no_first_token_block() -> None:
    assert prompt(300, 7) == prompt(300, 7)
    several = list(islice(prompts(300, 7), 20))
    assert len({tuple(tokens[:16]) for tokens in several}) == 20
    assert several[0] == prompt(300, 7)
    assert all(3 <= token < VOCABULARY for tokens in several for token in tokens)


def test_an_engine_has_room_for_more_than_two_prompts(tmp_path: Path) -> None:
    options = options_of(tmp_path, SIZES["mid"], tokens=3841)
    assert options["kv_cache_memory_bytes"] >= 2 * 3841 * 24576
    assert options["max_model_len"] > 3841
    assert options["kv_transfer_config"] is None


def test_engines_share_no_setting_of_vllm_with_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SOMETHING", "else")
    environment = environment_of(tmp_path)
    assert "VLLM_SOMETHING" not in environment
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["PATH"] == os.environ["PATH"]


def test_a_child_that_dies_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "poor.log"
    with (
        pytest.raises(ChildError, match=r"(?s)poor: ended with status 3.*all is lost"),
        Child([sys.executable, "-c", "print('all is lost'); exit(3)"], log=log) as child,
    ):
        child.wait_for(lambda: False, 60, "answer")


def test_closing_a_child_ends_its_own_children(tmp_path: Path) -> None:
    code = "import subprocess as s; print(s.Popen(['sleep', '600']).pid, flush=True); input()"
    log = tmp_path / "mother.log"
    with Child(["sh", "-c", f'{sys.executable} -c "{code}"; sleep 600'], log=log) as child:
        child.wait_for(lambda: child.log().endswith("\n"), 60, "pid")
        grandchild = Path("/proc") / child.log().split()[0]
    assert ends(grandchild)


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    code = f"""
import os, pathlib, signal
from beluga_bench.vllm.process import Child
print(Child(["sleep", "600"], log=pathlib.Path({str(tmp_path)!r}, "x.log")).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    parent = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert ends(Path("/proc") / parent.stdout.decode().strip())


def ends(process: Path) -> bool:
    """Return whether the process soon ends or is a zombie."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            state = process.joinpath("stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False
