# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Everything that can be closed, called after its end, beside it, and in a forked child.

``lifecycle_scenes.py`` makes one of each class, ``lifecycle_process.py`` has the phases.
No signal may end a process, nothing may hang, what is raised is Beluga's or a ValueError; a parent
whose children touched everything works on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.emulation import long
from support.lifecycle_process import PHASES
from support.lifecycle_scenes import ELSEWHERE, MAKERS, closable


# Quick runs close each thing alone; full ones also close its pool under it.
@pytest.mark.parametrize(
    "phase", [long(name) if name.endswith("the_pool") else name for name in PHASES]
)
def test_every_closable_object_outlives_its_users(shm: Path, phase: str) -> None:
    script = Path(__file__).with_name("support") / "lifecycle_process.py"
    ended = subprocess.run(
        [sys.executable, script, shm, phase],
        env={**os.environ, "XDG_RUNTIME_DIR": str(shm)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    wrong = {each["name"]: each["wrong"] for each in found if each["wrong"]}
    assert wrong == {}, ended.stderr[-5000:]
    assert [each["name"] for each in found] == list(MAKERS)


def test_no_class_that_can_be_closed_is_left_out() -> None:
    classes = closable()
    left_out = [
        f"{module}.{name}"
        for name, modules in classes.items()
        for module in modules
        if name not in MAKERS and not any(module.startswith(prefix) for prefix in ELSEWHERE)
    ]
    assert left_out == [], "say in lifecycle_scenes.py how one is made"
    assert set(MAKERS) - set(classes) == {
        "MetaClient",
        "TaskClient",
        "CacheMaintenance",
        "Indexer",
        "Tree",
    }
