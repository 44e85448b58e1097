# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Puts and gets are interrupted at any point, and no session gets space that is still written."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from support.cuda_gpu import PATIENCE_S, STRIPE, FailingGpu
from support.interrupts import PACKAGE, Interrupts, within_beluga
from support.soft_dsa import soft_engine

from beluga import IndexServer, KVCache, Pool
from beluga.errors import RpcError, UnsettledError
from beluga.transfer import CopyEngine
from beluga.transfer.cuda import CudaEngine
from tests.kvcache.conftest import digests, payload

LENGTH, COUNT = 16 * 20480, 3


class Scene:
    """Two caches of different sessions: ``mine`` and ``other``. ``mine`` copies with an engine that
    ``gpu.gate`` can stop; ``other`` copies with the CPU. If there is no GPU, the gate has no
    effect.
    """

    def __init__(self, pool: Pool, engine: CopyEngine, gpu: FailingGpu | None) -> None:
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
        self.mine.stat()  # waits for every user of its session
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

    def close(self) -> None:
        self.gate.set()
        self.mine.close()
        self.other.close()


def cuda(pool: Pool, *, bounced: bool = False) -> tuple[CopyEngine, FailingGpu]:
    gpu = FailingGpu(bounced=bounced)
    engine = CudaEngine(
        pool,
        driver=gpu,
        window_size=STRIPE,
        blocks=2,
        bounce_size=(2 if bounced else 8) * LENGTH,
    )
    assert engine.settle(PATIENCE_S)
    return engine, gpu


ENGINES: dict[str, Callable[[Pool], tuple[CopyEngine, FailingGpu | None]]] = {
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
