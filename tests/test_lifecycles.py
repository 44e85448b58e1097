# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""All closable objects are called after their end, during it, and in a forked child.
``lifecycle_scenes.py`` creates one of each class, ``lifecycle_process.py`` has the phases. No
signal may end a process, nothing may hang, and exceptions are Beluga's or a ValueError. The parent
still works after its children have used all objects.
"""

import json
import os
import sys
from pathlib import Path

import pytest
from support.commands import captured
from support.emulation import long
from support.lifecycle_process import PHASES
from support.lifecycle_scenes import ELSEWHERE, MAKERS, closable


# Quick runs close only the object; full ones also close its pool first.
@pytest.mark.parametrize(
    "phase", [long(name) if name.endswith("the_pool") else name for name in PHASES]
)
def test_every_closable_object_can_be_closed_before_its_users(shm: Path, phase: str) -> None:
    script = Path(__file__).with_name("support") / "lifecycle_process.py"
    ended = captured(
        [sys.executable, script, shm, phase],
        env={**os.environ, "XDG_RUNTIME_DIR": str(shm)},
        timeout=300,
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
    assert left_out == [], "add to lifecycle_scenes.py how one is made"
    assert set(MAKERS) - set(classes) == {
        "IndexClient",
        "TaskClient",
        "CacheMaintenance",
        "Indexer",
        "Tree",
    }
