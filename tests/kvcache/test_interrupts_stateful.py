# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Puts, gets and closes run in any order, with interrupts or GPU faults, while another session
runs.

Afterwards no byte outside of the caller's space has changed, and the cache works. No space stays
taken, except where it is unknown whether a copy has ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from support.cuda_gpu import STRIPE
from support.interrupts import Interrupts

from beluga import IndexServer, KVCache, Pool
from beluga.errors import TransferCancelledError, UnsettledError
from beluga.transfer.cuda import DriverError
from tests.kvcache.conftest import payload
from tests.kvcache.test_interrupts import COUNT, ENGINES, LENGTH, Alarms, Scene

LEFT_MAX, THEIRS_MAX, STILL_S = 2, 4, 0.02
TROUBLES = (KeyboardInterrupt, DriverError, TransferCancelledError, UnsettledError)


@dataclasses.dataclass(frozen=True)
class Trouble:
    """The faults of one step: the points of interrupts in the main thread, the number of signals
    once the GPU has work, the driver call that fails, and whether the driver reports nothing
    afterwards.
    """

    points: frozenset[int]
    signals: int
    fail_at: int
    silent: bool


TROUBLE = st.builds(
    Trouble,
    points=st.one_of(
        st.just(frozenset()),
        st.frozensets(st.integers(1, 40), min_size=1, max_size=3),
        st.frozensets(st.integers(1, 700), min_size=1, max_size=3),
    ),
    signals=st.sampled_from([0, 0, 1, 2, 9]),
    fail_at=st.one_of(st.just(0), st.integers(1, 40)),
    silent=st.sampled_from([False, False, False, True]),
)
MINE, THEIRS = (payload(COUNT, LENGTH, seed=seed) for seed in (7, 99))


class Interrupted(RuleBasedStateMachine):
    """The state machine: ``theirs`` are blocks of the other session, ``stored`` are ours."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="beluga-test-", dir="/dev/shm"))
        self.ended = contextlib.ExitStack()
        self.ended.callback(shutil.rmtree, self.folder)
        self.theirs: list[list[bytes]] = []
        self.stored: list[list[bytes]] = []
        self.left = 0

    @initialize(name=st.sampled_from(sorted(ENGINES)))
    def begin(self, name: str) -> None:
        paths = [self.folder / "a", self.folder / "b"]
        self.pool = self.ended.enter_context(
            Pool.create(paths, device_size=14 * STRIPE, coherence="hardware", sparse=True)
        )
        self.ended.enter_context(IndexServer(self.pool))
        self.scene = Scene(self.pool, *ENGINES[name](self.pool))
        self.ended.callback(self.scene.close)

    @contextlib.contextmanager
    def troubled(self, trouble: Trouble) -> Iterator[list[BaseException]]:
        """Cause the faults in this context, and yield the list of exceptions. The GPU is paused."""
        scene, gpu = self.scene, self.scene.gpu
        scene.gate.clear()
        self.opener = threading.Timer(STILL_S, scene.gate.set)
        self.opener.start()
        self.was_silent = trouble.silent and gpu is not None and self.left < LEFT_MAX
        launched = 0 if gpu is None else len(gpu.launches)
        if gpu is not None:
            gpu.fail_at, gpu.silent = trouble.fail_at, self.was_silent
        calls: list[BaseException] = []
        alarms = Alarms(lambda: gpu is None or len(gpu.launches) > launched, most=trouble.signals)
        with alarms:
            try:
                with Interrupts(trouble.points):
                    yield calls
            except TROUBLES as error:
                calls.append(error)

    def calm(self) -> None:
        """Wait until all remaining threads have ended."""
        self.opener.join()
        self.scene.mine.stat()
        if self.scene.gpu is not None:
            self.scene.gpu.fail_at, self.scene.gpu.silent = 0, False

    @rule(trouble=TROUBLE)
    def put(self, trouble: Trouble) -> None:
        keys = self.scene.fresh()
        before = self.scene.other.stat().grant_count
        with self.troubled(trouble) as errors:
            self.scene.mine.put(keys, MINE)
        self.they_put()
        self.calm()
        left = (self.scene.mine.stat().grant_count - before) // COUNT
        assert left in ((0, 1) if self.was_silent else (0,))
        self.left += left
        if not errors:
            self.stored.append(keys)
        else:
            self.scene.mine.remove(keys)

    @rule(trouble=TROUBLE)
    def get(self, trouble: Trouble) -> None:
        if not self.stored:  # no precondition: the stored blocks depend on the time of interrupts
            return
        found = np.zeros((COUNT, LENGTH), np.uint8)
        with self.troubled(trouble) as errors:
            assert self.scene.mine.get(self.stored[-1], found).hits == COUNT
        self.calm()
        assert errors or np.array_equal(found, MINE)

    @rule(trouble=TROUBLE)
    def close(self, trouble: Trouble) -> None:
        """Close the cache while an abandoned put continues, and open another one."""
        with self.troubled(dataclasses.replace(trouble, signals=9)):
            self.scene.mine.put(self.scene.fresh(), MINE)
        with contextlib.suppress(KeyboardInterrupt), Interrupts(trouble.points):
            self.scene.mine.close()
        self.they_put()
        self.opener.join()
        self.scene.mine.close()
        if self.scene.gpu is not None:
            self.scene.gpu.fail_at, self.scene.gpu.silent = 0, False
        left = self.scene.other.stat().grant_count // COUNT - self.left
        assert left in ((0, 1) if self.was_silent else (0,))
        self.left += left
        self.scene.mine = KVCache(self.pool, namespace="test", engine=self.scene.engine)

    @rule()
    def they_put(self) -> None:
        while len(self.theirs) >= THEIRS_MAX:
            assert self.scene.other.remove(self.theirs.pop(0)) == COUNT
        self.theirs.append(self.scene.fresh())
        assert self.scene.other.put(self.theirs[-1], THEIRS).stored == COUNT

    @rule()
    def remove(self) -> None:
        if self.stored:
            assert self.scene.mine.remove(self.stored.pop(0)) == COUNT

    @invariant()
    def nobody_is_harmed(self) -> None:
        found = np.zeros((COUNT, LENGTH), np.uint8)
        for keys in self.theirs:
            result = self.scene.other.get(keys, found)
            assert (result.hits, result.mismatches) == (COUNT, 0)
            assert np.array_equal(found, THEIRS)
        if hasattr(self, "scene"):
            stat = self.scene.mine.stat()
            assert (stat.grant_count, stat.pinned_count) == (self.left * COUNT, 0)

    def teardown(self) -> None:
        self.ended.close()


QUICK = settings(
    max_examples=12,
    stateful_step_count=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_interrupts_cause_no_failure(compiled: None) -> None:
    run_state_machine_as_test(Interrupted, settings=QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_interrupts_cause_no_failure(compiled: None) -> None:
    run_state_machine_as_test(
        Interrupted, settings=settings(QUICK, max_examples=300, stateful_step_count=30)
    )
