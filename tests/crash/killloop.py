# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Kills and stops real processes of a pool, at every crash point and at random: scripts/killloop.

First a walk: each crash point once, by a kill and by a stop, in the process that passes it; at a
point within the write of a line also after each of the line's 16-byte stores except the last. Then
random rounds: the seed selects the process, the point or time, and kill or stop. After each round
arena.py checks the pool.
"""

import argparse
import dataclasses
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from arena import Arena
from herd import WAIT_S, Member, StuckError, kill_all
from worker import Message

from beluga.child import run_program

# The process that passes a point, by the point's name or its first word.
SCENES = {
    "attach request detach call put get payload": "client",
    "drop": "client of a killed server",  # a client whose server dies
    "serve give lobby end session entry name extent space evict": "server",
    "grant reserve commit abort lookup release remove tombstone": "server",
    "take elect register recover tombstone.tier_written": "successor",  # a standby that takes over
    "pidfds": "server of a killed client",  # a server whose client dies
    "stop": "stopping server",  # a server that is stopped with SIGTERM
    "heartbeat": "client",
    # its server is stopped while it attaches
    "request.withdrawn": "client of a stopped server",
}
SCENE_OF = {word: scene for words, scene in SCENES.items() for word in words.split()}
ROUNDS_PER_POOL = 60
WALKS = 10  # further walks to points that were not hit
STOP_S = 0.05  # the longest time that a stopped process keeps the others waiting
SHM, ROOM = Path("/dev/shm"), 256 << 20  # a sparse file that outgrows its filesystem is a SIGBUS
STORES = (0b11, 0b1111, 0b111111)  # words in memory after 1, 2, 3 stores of 16 bytes
CHURN = 6  # steps of a client in a random round


CSRC = Path(__file__).resolve().parents[2] / "csrc"


def named(kind: str = "point|line") -> list[str]:
    """Return the names of the crash points in C's source (``csrc/coherence/crash_point.h``),
    sorted, each as often as it occurs.
    """
    return sorted(
        name
        for path in CSRC.rglob("*.[ch]")
        if path.name != "crash_point.h"
        for name in re.findall(rf'bl_crash_(?:{kind})\("([^"]+)"', path.read_text())
    )


@dataclasses.dataclass
class Result:
    """The result of a loop; ``errors`` has a line for the failure that ended it."""

    seed: int
    rounds: int = 0
    kills: int = 0
    stops: int = 0
    takeovers: int = 0
    blocks_checked: int = 0
    seconds: float = 0.0
    points: int = 0
    hit: set[str] = dataclasses.field(default_factory=set)
    missed: list[str] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Plan:
    """One round: ``scene`` is the process that is killed or stopped, when it passes ``point`` for
    the ``passage``-th time, or at a random time.
    """

    scene: str
    point: str | None
    passage: int = 1
    stop: bool = False
    walk: bool = False
    words: int = 0  # bit mask of the words of the line at ``point`` that are in memory

    @property
    def spot(self) -> str:
        """Return the name of the point, with the number of stores of its line in a walk."""
        if self.words in STORES:
            return f"{self.point}+{STORES.index(self.words) + 1}"
        return f"{self.point}~" if self.words else str(self.point)

    @property
    def arming(self) -> Message:
        """Return the order that arms the point in a process."""
        if self.point is None:
            return {}
        return {
            "arm": [self.point, self.passage, self.stop, self.words],
            "brings_tier": self.point == "tombstone.tier_written",
        }

    def __str__(self) -> str:
        where = f"{self.point}:{self.passage}" if self.point else "a random moment"
        where += f" with the words {self.words:#010b}" if self.words else ""
        return f"{'stop' if self.stop else 'kill'} the {self.scene} at {where}"


def torn(point: str) -> tuple[int, ...]:
    """Return the masks of words to stop at in the line of a point; none for other points."""
    return STORES if point.endswith("line") else ()


def walk(*, lines: bool = False) -> list[Plan]:
    """Return plans: each point with a kill and with a stop, and the middle of each line; with
    ``lines`` only the latter.
    """
    plans = []
    for point in named():
        scene = scene_of(point)
        plans += [Plan(scene, point, 1, stop, walk=True) for stop in (False, True)]
        plans += [Plan(scene, point, 1, walk=True, words=words) for words in torn(point)]
    return [plan for plan in plans if plan.words or not lines]


def scene_of(point: str) -> str:
    scene = SCENE_OF.get(point) or SCENE_OF.get(point.partition(".")[0])
    if scene is None:
        raise SystemExit(f"killloop: no scene has the point {point}; add it to SCENES")
    return scene


class Loop:
    """Runs rounds on one pool after another."""

    def __init__(self, directory: Path, result: Result, tour: list[Plan]) -> None:
        self._directory = directory
        self._tour = tour
        self._result = result
        self._dice = random.Random(result.seed)
        self._arena: Arena | None = None
        self._pools = 0
        self._used_up = False  # the next round needs a new pool

    def plans(self, rounds: int) -> Iterator[Plan]:
        """Yield the walk, then walks to the points that were not hit, then random rounds. A full
        pool opens no extent, so each walk after the first has a new pool.
        """
        everywhere, tour = named(), self._tour
        yield from tour[:rounds]
        for _ in range(WALKS if rounds >= len(tour) else 0):
            missed = [plan for plan in tour if plan.spot not in self._result.hit]
            self._used_up = bool(missed)
            yield from missed
        for _ in range(len(tour), rounds):
            if self._dice.random() < 0.5:
                point = self._dice.choice(everywhere)
                stop = self._dice.random() < 0.3
                words = self._dice.randrange(255) if torn(point) else 0
                passage = self._dice.randint(1, 4)
                yield Plan(scene_of(point), point, passage, stop, words=words)
            else:
                scene = self._dice.choice(["client", "server", "both"])
                yield Plan(scene, None, stop=self._dice.random() < 0.3)

    def run(self, rounds: int, report: bool) -> None:
        """Run all rounds, or those before the first failure."""
        for plan in self.plans(rounds):
            arena = self._fresh()
            try:
                self._play(arena, plan)
                arena.replace_dead()
                self._result.blocks_checked += arena.verify()
            except (AssertionError, OSError) as error:
                self._result.errors.append(
                    f"round {self._result.rounds} ({plan}; seed {self._result.seed}): {error}"
                )
                arena.kill()
                return
            self._result.rounds += 1
            if report and self._result.rounds % 100 == 0:
                print(f"{self._result.rounds} rounds, {len(self._result.hit)} points", flush=True)
        if self._arena:
            self._end(self._arena)

    def _fresh(self) -> Arena:
        """Return the pool of this round: a new one at intervals, of each kind in turn."""
        if self._arena is None or self._used_up or self._result.rounds % ROUNDS_PER_POOL == 0:
            if self._arena:
                self._end(self._arena)
            self._used_up = False
            folder = self._directory / str(self._pools)
            folder.mkdir()
            coherence = "software" if self._pools % 4 > 1 else "hardware"
            self._arena = Arena(folder, small=self._pools % 2 == 0, coherence=coherence)
            self._pools += 1
        return self._arena

    def _end(self, arena: Arena) -> None:
        arena.empty()
        arena.close()
        shutil.rmtree(self._directory / str(self._pools - 1))

    def _play(self, arena: Arena, plan: Plan) -> None:
        """Run one round until every call has ended and no process is stopped."""
        arming = plan.arming
        victim = (
            arena.server
            if plan.scene in ("server", "stopping server", "server of a killed client")
            else arena.clients[-1]
        )
        if arming and plan.scene != "successor":
            self._arm(victim, arming, plan)
        seed = self._dice.randrange(1 << 30)
        message: Message = {} if plan.walk else {"churn": CHURN}
        if plan.scene == "client of a stopped server":
            arena.server.halt()
            message["hasty"] = 1
        elif plan.scene == "client of a killed server":
            arena.server.kill()  # first, so that the client calls a dead server
        for number, member in enumerate(arena.clients):
            member.send({"seed": seed + number} | message)
        self._strike(arena, victim, plan)
        self._attend(arena, victim, plan, arming if plan.scene == "successor" else {})
        if plan.point and victim.ended is None:
            self._arm(victim, {"arm": [None, 0, False, 0]}, plan)
        if arming.get("brings_tier"):
            arena.server.kill()  # removals wait for the usual tier, which it lacks

    def _strike(self, arena: Arena, victim: Member, plan: Plan) -> None:
        """While the clients work, kill or stop the process of a round without a point."""
        if plan.scene == "stopping server":
            victim.send({"stop": 1})
        elif plan.scene == "successor":
            time.sleep(self._dice.uniform(0, 0.01))
            arena.server.kill()
        elif plan.scene == "server of a killed client":
            time.sleep(self._dice.uniform(0, 0.01))
            arena.clients[-1].kill()
        elif plan.point is None:
            time.sleep(self._dice.uniform(0, 0.03))
            for member in [victim, arena.server] if plan.scene == "both" else [victim]:
                if plan.stop:
                    member.halt()
                else:
                    member.kill()
                self._count(plan)

    def _attend(self, arena: Arena, victim: Member, plan: Plan, arming: Message) -> None:
        """Wait for the end of the work. Replaces a dead server (the first successor is armed), and
        continues stopped processes after a while.
        """
        waiting = dict(enumerate(arena.clients))
        leaving = plan.scene == "stopping server"
        stopped_at: dict[int, float] = {}
        end = time.monotonic() + 2 * WAIT_S
        # armed: the successor has not started yet
        while waiting or leaving or stopped_at or arming:
            for slot, member in list(waiting.items()):
                answer = member.poll(0.0005)
                if answer is not None:
                    arena.remember(answer)
                if answer is not None or member.ended is not None:
                    del waiting[slot]
            if arena.server.poll() is not None and leaving:
                arena.server.kill()  # the server has announced its stop
            if victim.fell:
                self._hit(plan, victim)
            self._wake(arena, stopped_at)
            if arena.server.ended is not None:
                leaving = False
                self._result.takeovers += 1
                successor = arena.start(**arming)
                victim = successor if arming else victim
                arming = {}
            if time.monotonic() > end:
                raise StuckError(f"calls of clients {sorted(waiting)} do not end")
        if victim.fell:
            self._hit(plan, victim)  # after the clients' last call had ended

    def _wake(self, arena: Arena, stopped_at: dict[int, float]) -> None:
        """Continue processes that have been stopped for ``STOP_S``; ``stopped_at``: by process."""
        for member in (arena.server, *arena.clients):
            if member.stopped:
                since = stopped_at.setdefault(member.pid, time.monotonic())
                if time.monotonic() - since > STOP_S:
                    member.signal(signal.SIGCONT)
            if not member.stopped:
                stopped_at.pop(member.pid, None)

    def _arm(self, member: Member, arming: Message, plan: Plan) -> None:
        """Arm or disarm a process, which may pass the point at once."""
        member.send(arming)
        while member.receive() is None and member.ended is None:
            self._hit(plan, member)
            member.signal(signal.SIGCONT)
        if member.fell:
            self._hit(plan, member)

    def _hit(self, plan: Plan, member: Member) -> None:
        """Count the kernel's report that the process died or stopped at the point."""
        if plan.point and not member.counted:
            member.counted = True
            self._result.hit.add(plan.spot)
            if self._arena and plan.words and plan.point.startswith("entry."):
                # no process was notified; the successor drops the removal
                self._arena.torn_entries = 1
            self._count(plan)

    def _count(self, plan: Plan) -> None:
        if plan.stop:
            self._result.stops += 1
        else:
            self._result.kills += 1


def run(rounds: int, seed: int, *, report: bool = False, lines: bool = False) -> Result:
    """Run ``rounds`` rounds in memory, and walk to missed points again. If there are enough rounds,
    every point must be hit.
    """
    tour = walk(lines=lines)
    spots = {plan.spot for plan in tour}
    start, result = time.monotonic(), Result(seed)
    roomy = SHM.is_dir() and shutil.disk_usage(SHM).free >= ROOM
    directory = Path(tempfile.mkdtemp(prefix="killloop-", dir=SHM if roomy else None))
    try:
        Loop(directory, result, tour).run(rounds, report)
    finally:
        kill_all()
        shutil.rmtree(directory, ignore_errors=True)
    result.points = len(spots)
    result.hit &= spots
    result.missed = sorted(spots - result.hit)
    result.seconds = round(time.monotonic() - start, 1)
    return result


def main() -> int:
    """Run the command; see scripts/killloop."""
    parser = argparse.ArgumentParser(prog="killloop", description=__doc__)
    parser.add_argument("--rounds", type=int, default=300, help="deaths and stops")
    parser.add_argument("--seed", type=int, default=None, help="the same seed, the same plans")
    parser.add_argument("--lines", action="store_true", help="walk only to the middle of lines")
    parser.add_argument("--json", action="store_true", help="print one object instead of lines")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    if not options.json:
        print(f"seed {seed}", flush=True)
    result = run(options.rounds, seed, report=not options.json, lines=options.lines)
    walked = options.rounds >= len(walk(lines=options.lines))
    if options.json:
        print(json.dumps(dataclasses.asdict(result) | {"hit": sorted(result.hit)}))
    else:
        for line in result.errors:
            print(line)
        if walked and result.missed:
            print(f"never hit: {' '.join(result.missed)}")
        print(
            f"{result.rounds} rounds in {result.seconds} s: {result.kills} kills, "
            f"{result.stops} stops, {result.takeovers} takeovers, {result.blocks_checked} blocks "
            f"checked, {len(result.hit)} of {result.points} points hit, "
            f"{len(result.errors)} errors"
        )
    return 1 if result.errors or (walked and result.missed) else 0


if __name__ == "__main__":
    run_program(main)
