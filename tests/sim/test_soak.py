# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The soak, and the report of fences and invalidations without effect."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import regressions
import soak
from children import Death, answers
from economy import thrift
from regressions import Case, kept, parse
from simulator import play, site

# ---- Failures that scripts/soak once found stay fixed, and its command line reports its
# results.


def test_recorded_failures_pass() -> None:
    wrong = [case for case in kept() if play(case.scenario, case.seed, kind=case.kind).result]
    assert wrong == []


@pytest.mark.long
def test_the_soak_counts_events(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--seconds", "0", "--seed", "1", "--json"]) == 0
    counters = json.loads(capsys.readouterr().out)
    assert counters["errors"] == 0
    assert min(counters[name] for name in ("runs", "accesses", "calls", "deaths")) > 0


def test_the_soak_prints_how_to_replay_a_failure_and_stores_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(regressions, "FOLDER", tmp_path)
    monkeypatch.setattr(soak, "scenarios", lambda: ("stray_store",))
    assert soak.main(["--seconds", "0", "--seed", "1"]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    case = kept()[0]
    assert case.wrong == "wrong bytes"
    assert any(first == f"wrong bytes: scripts/soak --replay {case}" for case in kept())


def test_replay_refuses_unknown_names() -> None:
    assert parse("lane:7") == Case("lane", 7, "software")
    assert parse("lane:7:hardware") == Case("lane", 7, "hardware")
    with pytest.raises(ValueError, match="no scenario"):
        parse("nowhere:7")
    with pytest.raises(ValueError, match="no scenario"):
        parse("lane:7:sideways")


def test_a_child_that_dies_is_a_failure() -> None:
    def body(job: str) -> str:
        if job == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return job + "d"

    found = dict(answers(["live", "die"], body, processes=2))
    assert found == {"live": "lived", "die": Death(signal.SIGKILL)}


def test_a_run_depends_on_nothing_but_its_seed() -> None:
    """The first runs of a process got memory with another alignment in a line than later ones."""
    code = """
from simulator import play
runs = [("kv_names", 595), ("kv_names", 1248), ("device_kv", 0), ("kv_full", 1)]
first, again = ([dict(play(*run, kind="mixed").stat) for run in runs] for _ in range(2))
assert first == again, (first, again)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)


# ---- The economy report finds needless flushes and fences, and does not list needed ones.


def test_a_poll_is_redundant_and_a_publication_is_not() -> None:
    found = {(t.site.function, t.site.verb, t.site.index): t for t in thrift(5, ("lane",))}
    polled = found["bl_round_refetch", "invalidate", 1]
    sent = found["bl_bulk_send", "fence_store", 0]
    assert 0 < polled.idle <= polled.done
    assert polled.idle > polled.done // 2
    assert sent.done > 0
    assert sent.idle == 0


def test_a_fence_after_already_fenced_writes_is_redundant() -> None:
    run = play("store_buffering", 3)
    number = site("bl_litmus_store_load", "invalidate")
    assert run.hits[number] > 0
    assert run.idle[number] > 0  # a line that is examined for the first time is not cached
    assert run.idle[site("bl_litmus_store_load", "fence_store")] == 0
