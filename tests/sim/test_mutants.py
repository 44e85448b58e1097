# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""scripts/mutants omits no verb, check or condition of the protocol."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import conditions
import mutants
import pytest
import simulator
from exemptions import EXEMPT, EXEMPTIONS
from mutants import NO_PROTOCOL, known_catches, main, name_of, protocol_sites
from native._sim import lib

CSRC = Path(__file__).resolve().parents[2] / "csrc"

# The verbs that a composed verb consists of.
COMPOUND = {
    "publish_line": ("stream_line", "fence_store"),
    "refetch": ("fence_full", "invalidate", "fence_full"),
    "stream_crc": ("stream",),
    "fetch_run": ("fetch",),
}
SIMPLE = (
    *("load64", "prefetch_line", "prefetch_range", "load_line", "fetch", "stream_line", "stream"),
    *("invalidate", "fence_store", "fence_full", "verify", "announce", "wake"),
)
USE = re.compile(rf"\bbl_({'|'.join([*SIMPLE, *COMPOUND])})\(")
NOT_TRIED = (*NO_PROTOCOL, "coherence/coherence.h", "coherence/sim.h", "coherence/crash_point.")
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


def in_csrc(path: Path) -> str:
    """Return the name of a source: folder/file."""
    return str(path.relative_to(CSRC))


def protocol_files() -> list[Path]:
    """Return all C files except scenarios, tools, the verbs themselves, and crash points."""
    return [
        path for path in sorted(CSRC.rglob("*.[ch]")) if not in_csrc(path).startswith(NOT_TRIED)
    ]


def test_every_verb_in_the_sources_is_a_site_of_the_build() -> None:
    written: Counter[tuple[str, str]] = Counter()
    for path in protocol_files():
        for verb in USE.findall(COMMENT.sub("", path.read_text())):
            written.update((in_csrc(path), part) for part in COMPOUND.get(verb, (verb,)))
    built = Counter((site.file, site.verb) for site in protocol_sites())
    assert built == written


@pytest.mark.long
def test_every_exemption_names_a_site_and_a_reason() -> None:
    with simulator.using(conditions.build()):
        there = {name_of(site): site for site in protocol_sites()}
    for change, exempt in EXEMPTIONS.items():
        assert set(exempt) <= set(there)
        for name, reason in exempt.items():
            drop = there[name].drop
            assert drop in (change, "either") if drop else change not in ("true", "false"), name
            assert "::" in reason or len(reason.split()) > 1


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_mutant_was_caught_once_or_has_an_exemption() -> None:
    """CI tries only the stored catches. ``scripts/mutants --new --update`` searches for the
    rest.
    """
    with simulator.using(conditions.build()):
        found = mutants.mutants(mutants.survey(min(2, os.cpu_count() or 1)))
        new = [str(m) for m in found if m.name not in known_catches() and not mutants.exempt(m)]
    assert new == []


def test_exemptions_are_listed_once_and_their_tests_exist() -> None:
    """A second entry would replace the first one."""
    counts = Counter((name, change) for name, change, _ in EXEMPT)
    assert [row for row, count in counts.items() if count > 1] == []
    for test in {why for _, _, why in EXEMPT if why.startswith("tests/") and " " not in why}:
        path, _, function = test.partition("::")
        assert f"def {function}(" in (CSRC.parent / path).read_text(), test


# The environments that distinguish machines; an empty one is this machine's own.
MACHINES = {
    "as it is": {},
    "few instructions": {"BELUGA_ISA": "sse2", "BELUGA_FLUSH": "clflush"},
    "another libc": {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-AVX512F,-ERMS"},
    "another heap": {
        "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=134217728:glibc.malloc.perturb=165"
    },
}
ENUMERATION = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
import conditions, mutants, simulator
mutants.COVERAGE_SEEDS = 1
with simulator.using(conditions.build()):
    assert simulator.build.lib.bl_cpu_features() == 0
    found = mutants.mutants(mutants.survey(1))
    print(hashlib.sha256("".join(sorted(m.name for m in found)).encode()).hexdigest())
    whole = [name for name in sorted(mutants.known_catches()) if name.endswith("left out")]
    for name in whole[::12]:  # a dropped condition may crash the simulator
        run = mutants.known_catches()[name]
        mutant = next(m for m in found if m.name == name)
        site, change = mutant.site.number, mutant.change
        print(name, simulator.play(run[0], run[2], skip=site, change=change, kind=run[1]).result)
"""


@pytest.mark.long
def test_mutants_and_their_catches_are_the_same_on_each_machine() -> None:
    conditions.build()
    seen = {}
    for machine, variables in MACHINES.items():
        command = [sys.executable, "-c", ENUMERATION, str(Path(__file__).parent)]
        done = subprocess.run(
            command,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        seen[machine] = done.stdout
    assert len(seen["as it is"].splitlines()) > 10
    assert set(seen.values()) == {seen["as it is"]}, seen


def test_a_simulated_cpu_has_no_features_on_any_machine() -> None:
    lib.bl_cpu_limit(0xFFFFFFFF)
    assert lib.bl_cpu_features() == 0


CONDITIONS = """
static int f(int a)
{
    /* if (a) */
    if (a > 1) {
        g(a);
        return 1;
    }
    if (b)
        h(c, d == "e" && e);
    while (i) j();
    if (k) l(); else m();
    if (v && w) break;
    return (n || !(o && p)) ? (int)bl_verify(q, r && s) : t;
}
enum { U = V && W };
"""


def test_a_condition_is_dropped_by_the_value_that_makes_it_pointless() -> None:
    found = re.findall(
        r'BL_CONDITION\("(\w+)\|((?:[^"\\]|\\.)*)"', conditions.rewritten(CONDITIONS)
    )
    assert found == [
        ("false", "a > 1"),
        ("true", "b"),
        ("true", r"d == \"e\""),
        ("true", "e"),
        ("true", "i"),
        ("either", "k"),
        ("false", "v && w"),
        ("true", "v"),
        ("true", "w"),
        ("false", "n"),
        ("true", "o"),
        ("true", "p"),
        ("true", "r"),
        ("true", "s"),
    ]
    one = re.compile(r'BL_CONDITION\("(?:[^"\\]|\\.)*", ((?:[^()]|\((?:[^()]|\(\))*\))*?)\)')
    bare = conditions.rewritten(CONDITIONS)
    while "BL_CONDITION" in bare:
        bare = one.sub(r"\1", bare, count=1) if one.search(bare) else ""
    assert bare == CONDITIONS


def test_the_copy_has_the_lines_of_the_source() -> None:
    for name in conditions.PROTOCOL:
        source = (CSRC / name).read_text()
        assert conditions.rewritten(source).count("\n") == source.count("\n")
        plain = [token.text for token in conditions.tokens_of(source)]
        kept = iter([token.text for token in conditions.tokens_of(conditions.rewritten(source))])
        assert all(text in kept for text in plain)  # in this order


ONE_OF_EACH = (
    ("lane", "bl_lane_send stream_line 0 left out"),
    ("lane", "bl_bulk_send fence_store 0 deferred"),
    ("lane", "bl_bulk_send stream 0 without its last line"),
    ("lobby", "bl_lobby_reply_read load_line 0 in the other half"),
    ("lane", "bl_lane_take reply->sequence != sequence 0 false"),
    ("lane", "bl_lane_send count > 0 0 true"),
)


@pytest.mark.long
@pytest.mark.parametrize(("scenario", "mutant"), ONE_OF_EACH)
def test_a_mutant_is_caught_and_counted(
    scenario: str, mutant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--scenario", scenario, "--seeds", "30", "--processes", "1"]
    assert main([*few, "--site", mutant, "--json"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert json.loads(first)["scenario"]
    assert last == "caught 1 of 1"


@pytest.mark.long
def test_new_mutants_are_those_that_are_not_remembered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, mutant = ONE_OF_EACH[0]
    known = {f"rpc/lane.c {mutant}": ("lane", "software", 0)}
    one = ["--scenario", "lane", "--site", mutant, "--seeds", "30", "--processes", "1"]
    for remembered, choice, tried in (
        *((known, "--new", 0), (known, "--remembered", 1)),
        *(({}, "--new", 1), ({}, "--remembered", 0)),
    ):
        monkeypatch.setattr(mutants, "known_catches", lambda remembered=remembered: remembered)
        assert main([*one, choice]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"caught {tried} of {tried}"


@pytest.mark.long
def test_a_survivor_fails_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "EXEMPTIONS", {})
    one = ["--scenario", "lane", "--site", "bl_lane_send size == 0 0 false", "--seeds", "2"]
    assert main(one) == 1  # copies nothing, so no run can detect it
    survivor, exempt, _, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"survived, [1-9]\d* runs: rpc/lane.c:\d+ bl_lane_send .*", survivor)
    assert exempt.startswith("0 mutants are exempt")
    assert last == "caught 0 of 1"


@pytest.mark.long
def test_skipped_work_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # mutants that were caught before are always tried
    monkeypatch.setattr(mutants, "known_catches", dict)
    one = ["--scenario", "lane", "--site", "bl_lane_send count > 0 0 true", "--seconds", "1e-9"]
    assert main(one) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["no time for 1", "caught 0 of 0"]
