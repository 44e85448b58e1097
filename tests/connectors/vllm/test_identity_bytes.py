# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Real engines that differ in one thing: those whose KV bytes differ never share a block, those
whose bytes are equal do, and every part of the identity is needed for it.
"""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from identity_role import CASES, NOT_SHOWN, TOKENS

from beluga import IndexServer, Pool
from beluga.connectors.identity import WEIGHTS

FOLDER = Path(__file__).parent
DIFFERENT = [name for name, case in CASES.items() if case.drop is not None]
ALIKE = [name for name, case in CASES.items() if case.drop is None and name != case.base]
WHOLE = ""  # the identity without a drop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

Engines: TypeAlias = "dict[str, dict[str, Any]]"


def lines_of(python: str, memory_root: Path, folder: Path, what: str) -> list[Any]:
    """Run a part of ``identity_role.py`` on a new pool. Returns its lines."""
    device = memory_root / f"beluga-{folder.parent.name}-{folder.name}"
    try:
        with Pool.create([device], device_size=64 << 20, lane_count=32) as pool, IndexServer(pool):
            done = subprocess.run(
                [python, str(FOLDER / "identity_role.py"), str(device), str(folder), what],
                check=False,
                capture_output=True,
                text=True,
                timeout=1200,
            )
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in done.stdout.splitlines()]
    finally:
        device.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def engines(
    vllm_python: str, memory_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Engines:
    """The blocks that each engine computed, and their names."""
    folder = tmp_path_factory.mktemp("identity")
    return {line["case"]: line for line in lines_of(vllm_python, memory_root, folder, "engines")}


def wrong(engines: Engines, drop: str = WHOLE) -> set[tuple[str, str]]:
    """Return the engines that would share a block with different bytes if the identity lacked what
    the case ``drop`` omits.
    """
    return {
        (first, other)
        for first, other in itertools.combinations(engines, 2)
        for mine, name, theirs, their_name in zip(
            engines[first]["bytes"],
            engines[first]["names"][drop],
            engines[other]["bytes"],
            engines[other]["names"][drop],
            strict=True,
        )
        if name == their_name and mine != theirs
    }


def test_all_engines_ran(engines: Engines) -> None:
    assert list(engines) == list(CASES)


def test_no_key_has_two_contents(engines: Engines) -> None:
    assert wrong(engines) == set()


@pytest.mark.parametrize("name", CASES)
def test_an_engine_uses_the_bytes_that_it_computes_itself(engines: Engines, name: str) -> None:
    """With any blocks of earlier engines in the pool."""
    assert engines[name]["used"] == engines[name]["bytes"]


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_different_engine_computes_other_bytes_and_gets_no_hits(
    engines: Engines, name: str
) -> None:
    assert engines[name]["bytes"] != engines[CASES[name].base]["bytes"]
    assert engines[name]["hits"] == 0


@pytest.mark.parametrize("name", ALIKE)
def test_an_identical_engine_computes_the_same_bytes_and_hits_all(
    engines: Engines, name: str
) -> None:
    assert engines[name]["bytes"] == engines[CASES[name].base]["bytes"]
    assert engines[name]["hits"] == TOKENS


@pytest.mark.parametrize("name", DIFFERENT)
def test_without_a_part_of_the_identity_an_engine_would_find_wrong_bytes(
    engines: Engines, name: str
) -> None:
    assert (CASES[name].base, name) in wrong(engines, name)


def test_every_field_of_a_namespace_is_dropped_or_cannot_be_shown(engines: Engines) -> None:
    dropped = {field for case in CASES.values() if case.drop for field in case.drop.fields}
    assert not dropped & NOT_SHOWN.keys()
    fields = {field for field in engines["usual"]["fields"] if not field.startswith("config ")}
    assert fields | {WEIGHTS} == {name for name in dropped if " " not in name} | NOT_SHOWN.keys()


@pytest.fixture(scope="module")
def updated(
    vllm_python: str, memory_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The blocks of a prompt that are wrong after an update, by the step that is left out."""
    folder = tmp_path_factory.mktemp("updates")
    (report,) = lines_of(vllm_python, memory_root, folder, "updates")
    return dict(report)


def test_after_an_update_all_bytes_are_of_the_new_weights(updated: dict[str, Any]) -> None:
    assert updated["wrong"]["nothing"] == []
    # before; on old KV in vLLM's own cache; after its reset; another salt; again; back
    assert updated["hits"] == [0, 0, 0, 0, TOKENS, 0]
    assert updated["back"]


@pytest.mark.parametrize(
    "step", ["the calls of the workers", "the notice", "a generation of its own"]
)
def test_without_a_step_after_an_update_bytes_are_wrong(updated: dict[str, Any], step: str) -> None:
    """The first two blocks are of the old weights."""
    assert {0, 1} <= set(updated["wrong"][step])
