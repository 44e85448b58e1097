# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The policy table in Python; ``tests/sim/test_policy_rows.py`` checks its rows."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.plans import cut

from beluga._ffi import lib
from beluga.errors import DeviceFaultError, EngineUnavailableError
from beluga.pool import STRIPE_SIZE, Pool
from beluga.transfer import Plan, plan_blocks, plan_rows, policy
from beluga.transfer.policy import Ddio, Initiator, Memory, Step

CAREFUL = [Step.FENCE, Step.INVALIDATE, Step.FLUSH]


@pytest.fixture(scope="module", params=["hardware", "software"])
def pool(request: pytest.FixtureRequest, memory_root: Path) -> Iterator[Pool]:
    folder = Path(tempfile.mkdtemp(prefix="beluga-test-", dir=memory_root))
    paths = [folder / "a", folder / "b"]
    size = 8 * STRIPE_SIZE
    try:
        with Pool.create(paths, device_size=size, coherence=request.param, sparse=True) as made:
            yield made
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("initiator", Initiator)
def test_an_unknown_platform_uses_the_safest_row(initiator: Initiator) -> None:
    safest = policy.row(initiator, Memory.WRITE_BACK, Ddio.UNKNOWN)
    for memory, ddio in itertools.product(Memory, Ddio):
        row = policy.row(initiator, memory, ddio)
        unknown = policy.row(initiator, memory, Ddio.UNKNOWN)
        for other in (unknown, safest):
            assert CAREFUL.index(row.before_read) <= CAREFUL.index(other.before_read)
            assert CAREFUL.index(row.after_write) <= CAREFUL.index(other.after_write)


def test_the_optimizations_of_the_paper_are_in_the_table() -> None:
    cpu = policy.row("cpu", "write-back", "on")
    assert (cpu.before_read, cpu.after_write) == (Step.INVALIDATE, Step.FENCE)  # O1
    dsa = policy.row("dsa", "uncacheable", "on")
    assert (dsa.before_read, dsa.after_write) == (Step.FENCE, Step.FENCE)  # O2
    gpu = policy.row("gpu", "uncacheable", "off")
    assert (gpu.before_read, gpu.after_write) == (Step.FENCE, Step.FENCE)  # O3
    for memory, ddio in itertools.product(Memory, Ddio):
        if (memory, ddio) != (Memory.UNCACHEABLE, Ddio.OFF):
            row = policy.row("gpu", memory, ddio)
            assert (row.before_read, row.after_write) == (Step.INVALIDATE, Step.FLUSH)


def test_a_value_that_is_not_in_the_table_is_rejected() -> None:
    with pytest.raises(ValueError, match="fpga"):
        policy.row("fpga", "write-back", "on")


def test_the_default_is_the_safe_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BELUGA_DDIO", raising=False)
    monkeypatch.delenv("BELUGA_MEMORY", raising=False)
    for maker in ("GenuineIntel", "AuthenticAMD"):
        cpuinfo = tmp_path / maker
        cpuinfo.write_text(f"vendor_id\t: {maker}\n")
        found = policy.probe(cpuinfo=cpuinfo)
        assert (found.memory, found.ddio) == (Memory.WRITE_BACK, Ddio.UNKNOWN)
        assert ("Intel" in found.ddio_source) == (maker == "GenuineIntel")
    assert policy.probe(cpuinfo=tmp_path / "none").ddio == Ddio.UNKNOWN


def test_the_environment_overrides_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELUGA_DDIO", "off")
    monkeypatch.setenv("BELUGA_MEMORY", "uncacheable")
    found = policy.probe()
    assert (found.memory, found.ddio) == (Memory.UNCACHEABLE, Ddio.OFF)
    assert (found.memory_source, found.ddio_source) == ("BELUGA_MEMORY", "BELUGA_DDIO")
    assert found.row("gpu").after_write == Step.FENCE
    monkeypatch.setenv("BELUGA_DDIO", "perhaps")
    with pytest.raises(EngineUnavailableError, match="BELUGA_DDIO=perhaps is not on or off or"):
        policy.probe()


def plans(offset: int) -> list[Plan]:
    address = np.array([[1 << 20]], np.uint64)
    whole = plan_blocks(address, np.array([70_000]), np.array([offset]), chunk_size=4096)
    rows = {
        "addresses": np.array([1 << 20] * 2, np.uint64),
        "blocks": np.array([0, 0]),
        "places": np.array([3, 60_001]),
        "sizes": np.array([100, 9999]),
    }
    where = {"offsets": np.array([offset]), "length": 70_000, "chunk_size": 4096}
    sums = np.zeros((1, 18), np.uint32)
    return [
        whole,
        *cut(whole, 20_000),
        plan_rows(**rows, **where),  # type: ignore[arg-type]
        plan_rows(**rows, **where, checksums=sums),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("ddio", Ddio)
@pytest.mark.parametrize("memory", Memory)
@pytest.mark.parametrize("initiator", Initiator)
def test_cache_maintenance_requires_plans_inside_the_pool(
    pool: Pool, initiator: str, memory: Memory, ddio: Ddio
) -> None:
    maintenance = policy.PlatformPolicy(memory, ddio, "", "").maintenance(initiator, pool)
    for plan in plans(pool.geometry.size - 70_016):
        maintenance.before_read(plan)
        maintenance.after_write(plan)
    for plan in plans(pool.geometry.size - 65_536):
        if plan.chunks["offset"].max() + 4096 > pool.geometry.size:
            for take in (maintenance.before_read, maintenance.after_write):
                with pytest.raises(OSError, match="argument"):
                    take(plan)
    whole = plans(pool.geometry.data_offset)[0]
    whole.chunks["offset"][-1] = 2**64 - 64  # the end is before the start
    for take in (maintenance.before_read, maintenance.after_write):
        with pytest.raises(OSError, match="argument"):
            take(whole)


def test_each_step_maps_to_its_c_constant(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    class Lib:
        def bl_plan_maintenance(
            self, _pool: Any, _plan: Any, maintenance: int, threads: int
        ) -> int:
            assert threads == 3
            taken.append(maintenance)
            return 0

        def __getattr__(self, name: str) -> Any:
            return getattr(lib, name)

    monkeypatch.setattr(policy, "lib", Lib())
    plan = plans(pool.geometry.data_offset)[0]
    number = {step: getattr(lib, f"BL_MAINTENANCE_{step.name}") for step in Step}
    assert len(set(number.values())) == len(Step)
    for before, after in itertools.product(Step, Step):
        taken.clear()
        row = policy.PolicyRow(before_read=before, after_write=after)
        maintenance = policy.CacheMaintenance(pool, row, threads=3)
        maintenance.before_read(plan)
        maintenance.after_write(plan)
        assert taken == [number[before], number[after]]


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_threads_maintain_a_plan_up_to_its_last_line(shm: Path, threads: int) -> None:
    with Pool.create([shm / "device"], device_size=16 << 20, coherence="software") as pool:
        size = 4 << 20
        offset = pool.geometry.size - size
        plan = plan_blocks(
            np.array([[1 << 20]], np.uint64),
            np.array([size]),
            np.array([offset], np.uint64),
            chunk_size=16 << 10,
        )
        row = policy.PolicyRow(Step.INVALIDATE, Step.FLUSH)
        maintenance = policy.CacheMaintenance(pool, row, threads)
        takes = (maintenance.before_read, maintenance.after_write)
        for take in takes:
            take(plan)
        os.truncate(shm / "device", (16 << 20) - 4096)  # the last page is unmapped
        for take in takes:
            with pytest.raises(DeviceFaultError):
                take(plan)
