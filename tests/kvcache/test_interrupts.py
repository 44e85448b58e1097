# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Puts, gets and closes are interrupted at any point, by exceptions and by signals, alone and in
any order (Hypothesis): no session gets space that is still written, and no block is damaged.
"""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import itertools
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

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
from support import role
from support.cuda_gpu import PATIENCE_S, STRIPE, Gpu
from support.interrupts import PACKAGE, Interrupts, within_beluga
from support.soft_dsa import soft_engine

from beluga import IndexServer, KVCache, Pool
from beluga.errors import RpcError, TransferCancelledError, UnsettledError
from beluga.transfer import CopyEngine
from beluga.transfer.cuda import CudaEngine, DriverError
from tests.kvcache.conftest import digests, payload

LENGTH, COUNT = 16 * 20480, 3


class Scene:
    """Two caches of different sessions: ``mine`` and ``other``. ``mine`` copies with an engine that
    ``gpu.gate`` can stop; ``other`` copies with the CPU. If there is no GPU, the gate has no
    effect.
    """

    def __init__(self, pool: Pool, engine: CopyEngine, gpu: Gpu | None) -> None:
        self.pool, self.engine, self.gpu = pool, engine, gpu
        self.gate = threading.Event() if gpu is None else gpu.gate
        self.gate.set()
        self.mine = KVCache(pool, namespace="test", engine=engine)
        self.other = KVCache(pool, namespace="test", engine="cpu")
        self._numbers = itertools.count()

    def fresh(self) -> list[bytes]:
        return digests(COUNT, start=COUNT * next(self._numbers))

    def others_take_the_space(self) -> tuple[list[bytes], np.ndarray]:
        keys, blocks = self.fresh(), payload(COUNT, LENGTH, seed=99)
        assert self.other.put(keys, blocks).stored == COUNT
        return keys, blocks

    def settled(self, theirs: tuple[list[bytes], np.ndarray], *, left: int = 0) -> None:
        """Check the state after all interrupted calls have ended.

        No other session's bytes have changed, only ``left`` blocks stay taken, and the cache works.
        """
        self.gate.set()
        self.idle()
        found = np.zeros((COUNT, LENGTH), np.uint8)
        for seed in range(2):  # the second one may need the first one's buffers
            keys, blocks = self.fresh(), payload(COUNT, LENGTH, seed=seed)
            assert self.mine.put(keys, blocks).stored == COUNT
            found[:] = 0
            assert self.mine.get(keys, found).hits == COUNT
            assert np.array_equal(found, blocks)
            assert self.mine.remove(keys) == COUNT
        result = self.other.get(theirs[0], found)
        assert (result.hits, result.mismatches) == (COUNT, 0)
        assert np.array_equal(found, theirs[1])
        stat = self.mine.stat()
        assert (stat.grant_count, stat.pinned_count) == (left, 0)
        assert self.other.remove(theirs[0]) == COUNT

    def idle(self) -> None:
        """Wait until no batch of ``mine`` runs."""
        self.mine._worker.submit(lambda _: None).wait()
        with self.mine._moving:
            pass

    def close(self) -> None:
        self.gate.set()
        self.mine.close()
        self.other.close()


def cuda(pool: Pool, *, bounced: bool = False) -> tuple[CopyEngine, Gpu]:
    gpu = Gpu(bounced=bounced)
    engine = CudaEngine(
        pool,
        gpu,
        window_size=STRIPE,
        blocks=2,
        bounce_size=(2 if bounced else 8) * LENGTH,
    )
    assert engine.settle(PATIENCE_S)
    return engine, gpu


ENGINES: dict[str, Callable[[Pool], tuple[CopyEngine, Gpu | None]]] = {
    "bounced": lambda pool: cuda(pool, bounced=True),
    "direct": cuda,
    "dsa": lambda pool: (soft_engine(pool), None),
}


LONG = {"bounced"}


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in ENGINES
    ]
)
def scene(request: pytest.FixtureRequest, shm: Path, compiled: None) -> Iterator[Scene]:
    paths = [shm / "a", shm / "b"]
    with (
        Pool.create(paths, device_size=12 * STRIPE, coherence="hardware", sparse=True) as pool,
        IndexServer(pool),
    ):
        made = Scene(pool, *ENGINES[request.param](pool))
        yield made
        made.close()


@pytest.mark.parametrize(
    "again",
    [None, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.slow)],
)
def test_a_put_may_be_interrupted_anywhere(scene: Scene, again: int | None) -> None:
    """The first interrupt is raised at each point in turn, a second one ``again`` points later."""
    ended = False
    for point in itertools.count(1):
        keys, blocks = scene.fresh(), payload(COUNT, LENGTH, seed=7)
        at = {point} if again is None else {point, point + again}
        scene.gate.clear()
        with Interrupts(at) as interrupts:
            opener = threading.Timer(0.005, scene.gate.set)
            opener.start()
            try:
                scene.mine.put(keys, blocks)
                ended = interrupts.count < point
            except KeyboardInterrupt:
                pass
        theirs = scene.others_take_the_space()
        opener.join()
        scene.settled(theirs)
        scene.mine.remove(keys)
        if ended:
            break
    assert point > 10


def test_the_thread_of_a_cache_may_be_interrupted_at_start_and_end(scene: Scene) -> None:
    """Its first put and its close are interrupted at each point, those in ``threading``, too."""
    blocks = payload(COUNT, LENGTH, seed=7)
    scene.mine.put(scene.fresh(), blocks)  # starts the threads of the engine
    before = _thread._count()
    for point in itertools.count(1):
        keys = scene.fresh()
        cache = KVCache(scene.pool, namespace="test", engine=scene.engine)
        with contextlib.suppress(KeyboardInterrupt), Interrupts({point}, called=True) as first:
            cache.put(keys, blocks)
        with contextlib.suppress(KeyboardInterrupt), Interrupts({point}, called=True) as second:
            cache.close()
        with contextlib.suppress(RpcError):  # the cache is closed even if close() was interrupted
            cache.put(keys, blocks)
        _ended(cache.close)
        scene.other.remove(keys)
        if max(first.count, second.count) < point:
            break
    assert point > 10
    until = time.monotonic() + PATIENCE_S
    while _thread._count() > before:
        assert time.monotonic() < until
        time.sleep(0.001)


def _ended(close: Callable[[], None]) -> None:
    """Close in another thread, so that a close that hangs fails the test at once."""
    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


class Alarms:
    """Sends signals to the main thread from another thread, once the main thread ``waits``.

    It sends at most ``most`` signals until the context ends. A signal within Beluga's code raises
    ``KeyboardInterrupt``.
    """

    def __init__(self, waits: Callable[[], bool], *, most: int = 1000) -> None:
        self._waits, self._most = waits, most
        self._before = signal.signal(signal.SIGUSR1, _on_signal)
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._send)

    def __enter__(self) -> Alarms:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()
        signal.signal(signal.SIGUSR1, self._before)

    def _send(self) -> None:
        while not self._waits() and not self._left.wait(0.001):
            pass
        main = threading.main_thread().ident
        assert main is not None
        for _ in range(self._most):
            if self._left.wait(0.002):
                break
            signal.pthread_kill(main, signal.SIGUSR1)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if within_beluga(frame):
        raise KeyboardInterrupt


def test_a_second_interrupt_raises_and_the_copy_keeps_its_space(scene: Scene) -> None:
    gpu = scene.gpu
    if gpu is None:
        pytest.skip("the software queue cannot be held still")
    scene.gate.clear()
    before = len(gpu.launches)
    with Alarms(lambda: len(gpu.launches) > before), pytest.raises(KeyboardInterrupt):
        scene.mine.put(keys := scene.fresh(), payload(COUNT, LENGTH, seed=7))
    assert not scene.gate.is_set()
    theirs = scene.others_take_the_space()
    scene.settled(theirs)
    assert scene.mine.lookup(keys) == 0  # the block's memory may have been reused


def test_space_stays_allocated_while_the_end_of_a_copy_is_unknown(scene: Scene) -> None:
    gpu = scene.gpu
    if gpu is None:
        pytest.skip("the software queue always reports the end of a copy")
    nonce = scene.mine.client.stat().nonce
    scene.gate.clear()
    gpu.silent = True
    keys = scene.fresh()
    with pytest.raises(UnsettledError, match="restart"):
        scene.mine.put(keys, payload(COUNT, LENGTH, seed=7))
    gpu.silent = False
    theirs = scene.others_take_the_space()
    scene.settled(theirs, left=COUNT)
    assert scene.mine.client.stat().nonce != nonce
    assert scene.other.put(keys, payload(COUNT, LENGTH)).pending == COUNT
    scene.mine.close()  # detaches the new session, not the abandoned one
    assert scene.other.stat().grant_count == COUNT


def test_a_hook_of_pytest_within_beluga_is_not_interrupted() -> None:
    """Python calls such a hook after an interrupted finalizer of Beluga."""
    beluga: dict[str, Any] = {}
    source = "def call(function):\n    return function()\n"
    exec(compile(source, PACKAGE + "/finalizer.py", "exec"), beluga)  # noqa: S102
    for name, received in (("json", True), ("_pytest.unraisableexception", False)):
        theirs: dict[str, Any] = {"__name__": name, "sys": sys, "within": within_beluga}
        exec("def hook():\n    return within(sys._getframe())\n", theirs)  # noqa: S102
        assert beluga["call"](theirs["hook"]) is received


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
        self.scene.idle()
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


# ---- Real signals


WANTED, BLOCKS, BYTES = 40, 4, 1 << 20  # interrupts; blocks of a put and their size
OURS = 1 << 30  # the first of the test's keys, which the process does not use


def interrupted_copies(wanted: int, paths: list[str]) -> None:
    """Put and get with the software DSA until signals have interrupted so many calls; then print
    their number. A put and a get must succeed afterwards.
    """
    mine, target = payload(COUNT, BYTES, seed=7), np.zeros((COUNT, BYTES), np.uint8)
    with Pool.open(paths) as pool:
        cache = KVCache(pool, namespace="test", engine=soft_engine(pool))
        signal.signal(signal.SIGINT, _on_signal)
        role.reply("ready")
        interrupted = 0
        for number in itertools.count():
            keys = digests(COUNT, start=number * COUNT)
            try:
                cache.put(keys, mine)
                if cache.get(keys, target).hits == COUNT:
                    assert np.array_equal(target, mine)
            except KeyboardInterrupt:
                interrupted += 1
            while True:
                with contextlib.suppress(KeyboardInterrupt):
                    cache.remove(keys)
                    break
            if interrupted >= wanted:
                break
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        keys = digests(COUNT, start=1 << 20)
        assert cache.put(keys, mine).stored == COUNT
        target[:] = 0
        assert cache.get(keys, target).hits == COUNT
        assert np.array_equal(target, mine)
        cache.close()
    role.reply(interrupted)


def test_pairs_of_signals_do_not_damage_blocks(shm: Path) -> None:
    """An interrupted put releases its space only after its last byte is written, so another session
    that gets the space reads what it wrote itself.
    """
    paths, dice = [shm / "a", shm / "b"], random.Random(5)
    blocks, target = payload(BLOCKS, BYTES, seed=99), np.zeros((BLOCKS, BYTES), np.uint8)
    with (
        Pool.create(paths, device_size=24 << 20, coherence="hardware", sparse=True) as pool,
        IndexServer(pool),
        KVCache(pool, namespace="test", engine="cpu") as cache,
        role.Process(interrupted_copies, WANTED, paths) as child,
    ):
        for turn in range(100_000):
            time.sleep(dice.uniform(0, 0.003))
            for _ in range(2):
                child.signal(signal.SIGINT)
                time.sleep(dice.uniform(0, 0.0003))
            keys = digests(BLOCKS, start=OURS + turn * BLOCKS)
            stored = cache.put(keys, blocks).stored
            result = cache.get(keys[:stored], target[:stored])
            assert (result.hits, result.mismatches) == (stored, 0)
            assert np.array_equal(target[:stored], blocks[:stored])
            cache.remove(keys)
            if answer := child.receive(0):
                break
        assert int(answer) == WANTED
        assert child.end() == 0
        stat = cache.stat()
        assert (stat.grant_count, stat.pinned_count) == (0, 0)
