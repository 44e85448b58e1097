# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Every C function that is given a pool returns an error if its devices fail; none ends the
process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import faulting
from support.emulation import EMULATED, PATIENCE

from beluga._ffi import lib


def test_every_function_with_a_pool_parameter_is_covered() -> None:
    called = set(faulting.FAULTS) | set(faulting.SURVIVES) | faulting.APART
    assert faulting.functions() == called & faulting.functions()
    assert not set(faulting.FAULTS) & set(faulting.SURVIVES)


def test_a_failed_device_is_an_error_of_every_function(shm: Path) -> None:
    ended = subprocess.run(
        [sys.executable, faulting.__file__, str(shm)],
        capture_output=True,
        text=True,
        timeout=120 * PATIENCE,
        check=False,
    )
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert ended.returncode == 0, (lines[-1:], ended.stderr[-2000:])
    statuses = {line["name"]: line["status"] for line in lines if "name" in line}
    fault = -lib.BL_ERROR_DEVICE_FAULT
    expected = dict.fromkeys(faulting.FAULTS, fault)
    if EMULATED:  # only a flush, and qemu-user's dc instruction accesses no memory
        expected["bl_plan_maintenance"] = 0
    assert statuses == expected | {name: statuses[name] for name in faulting.SURVIVES}
    assert {statuses[name] for name in faulting.SURVIVES} <= {None, 0}
