# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Every row of the policy table is sufficient and necessary for the simulator's devices. Without
the steps that a row omits, bytes must stay correct in the worlds of the row. Without a step that
the row has, they must become wrong in one of these worlds. Uncacheable memory with DDIO off is the
simulator's coherent world, where no line of the pool is ever in a cache; on uncacheable memory with
DDIO on or unknown the GPU's writes are in a cache as they are on write-back memory, and the rows
are the same.
"""

import pytest
from simulator import caught, failures, play, site

from beluga.transfer.policy import Ddio, Initiator, Memory, PolicyRow, Step, row

SEEDS = 40
HUNT = 600
WRITTEN = ("bl_device_written", "invalidate")
READS = ("bl_device_reads", "invalidate")

# For each device on write-back memory, the worlds of its writes and of its reads: DSA's cache
# control is off, or has its documented effect on inspected machines.
CACHED = [
    (Initiator.GPU, Ddio.ON, "device_put", "device_get"),
    (Initiator.GPU, Ddio.OFF, "device_put", "device_get"),
    (Initiator.GPU, Ddio.UNKNOWN, "device_put", "device_get"),
    (Initiator.DSA, Ddio.ON, "device_dsa_memory", "device_dsa_memory"),
    (Initiator.DSA, Ddio.OFF, "device_dsa_memory", "device_dsa_memory"),
    (Initiator.DSA, Ddio.UNKNOWN, "device_dsa", "device_dsa"),
]


def judge(step: Step, scenario: str, verb: tuple[str, str], *, coherent: bool = False) -> None:
    """Check that the flush of ``verb`` can be omitted from the scenario exactly if the step is a
    fence.
    """
    number = site(*verb)
    if step == Step.FENCE:
        runs = [play(scenario, seed, skip=number, coherent=coherent) for seed in range(SEEDS)]
        assert failures(runs) == []
    else:
        assert caught(scenario, number, seeds=HUNT, coherent=coherent)


@pytest.mark.parametrize(("initiator", "ddio", "puts", "gets"), CACHED)
def test_rows_of_devices_on_write_back_memory(
    initiator: Initiator, ddio: Ddio, puts: str, gets: str
) -> None:
    found = row(initiator, Memory.WRITE_BACK, ddio)
    if found.after_write == Step.FENCE:  # all that its scenario runs
        assert failures([play(puts, seed) for seed in range(SEEDS)]) == []
        assert caught(puts, site("bl_device_ordered", "fence_full"), seeds=HUNT)
    else:
        judge(found.after_write, puts, WRITTEN)
    judge(found.before_read, gets, READS)


@pytest.mark.parametrize("ddio", Ddio)
def test_rows_of_the_cpu_on_write_back_memory(ddio: Ddio) -> None:
    found = row(Initiator.CPU, Memory.WRITE_BACK, ddio)
    assert found.after_write == Step.FENCE  # streamed, and never flushed in these scenarios
    judge(found.before_read, "device_put", ("bl_engine_read", "invalidate"))
    assert caught("device_get", site("bl_engine_write", "fence_store"), seeds=HUNT)


@pytest.mark.parametrize("initiator", Initiator)
def test_rows_of_uncacheable_memory_that_devices_do_not_cache(initiator: Initiator) -> None:
    found = row(initiator, Memory.UNCACHEABLE, Ddio.OFF)
    assert found == PolicyRow(Step.FENCE, Step.FENCE)
    for scenario in ("device_put", "device_get", "device_dsa"):
        for verb in (WRITTEN, READS, ("bl_engine_read", "invalidate")):
            judge(Step.FENCE, scenario, verb, coherent=True)


def test_uncacheable_memory_does_not_help_where_devices_may_cache() -> None:
    for ddio in (Ddio.ON, Ddio.UNKNOWN):
        cached = row(Initiator.GPU, Memory.WRITE_BACK, ddio)
        assert row(Initiator.GPU, Memory.UNCACHEABLE, ddio) == cached
    unknown = row(Initiator.DSA, Memory.WRITE_BACK, Ddio.UNKNOWN)
    assert row(Initiator.DSA, Memory.UNCACHEABLE, Ddio.UNKNOWN) == unknown
