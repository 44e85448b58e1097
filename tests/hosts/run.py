# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Two hosts share blocks in one pool; one hangs and comes back, the other dies.

It proves that real devdax nodes work, that hosts may name the devices in different orders, and that
a pool survives its server's host. It does not prove coherence: the guests share this machine's
caches, and the emulation's flushes do nothing. Run by scripts/two-hosts.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from guest import DEVICE_SIZE, WAIT_S, Guest, GuestError, GuestProcess
from image import Image, UnavailableError, image

from beluga.child import run_program

NODES = ("/dev/dax0.0", "/dev/dax1.0")
SKIPPED = 77  # exit status: guests cannot run here
BELUGA = "beluga.cli.main:main"
POOL = tuple(word for node in NODES for word in ("--pool", node))
WORKER = "worker:main"

ANNS, BOBS = (0, 24), (1000, 1024)  # blocks that each puts at first
LATER = (2000, 2024)  # put between the two failures
LAST = (3000, 3024)
TRIES = 5
RAN_OUT_MAX = 1  # timeouts of a client: one by chance, not one at each takeover
CHURNED = (5000, 5160)  # put and got by both at random while hosts fail


class Run:
    """Guests "ann", host 1, and "bob", host 2, which finds the devices in the other order."""

    def __init__(self, image: Image, directory: Path, guests: ExitStack) -> None:
        devices = [directory / "device.0", directory / "device.1"]
        for device in devices:
            device.touch()
            os.truncate(device, DEVICE_SIZE)
        self.ann = Guest("ann", image, devices, directory)
        guests.callback(self.ann.kill)
        self.bob = Guest("bob", image, devices[::-1], directory)
        guests.callback(self.bob.kill)
        self.there: set[int] = set()  # committed, as reported to a client

    def play(self) -> None:
        """Run all stages. Raises GuestError at the first failed check."""
        ann, bob = self.ann, self.bob
        with stage("both boot"):
            ann.ready()
            bob.ready()
        with stage("pool made on one host; memory accepted from both"):
            ann.run("create", BELUGA, "pool", "create", *NODES)
            self._verify()
        with stage("served on one host; a client on each"):
            first = self._serve(ann, "first", epoch=1)
            at_ann = self._worker(ann, "client-1")
            at_bob = self._worker(bob, "client-2")
        with stage("blocks put and got across"):
            self._put(at_ann, ANNS)
            self._put(at_bob, BOBS)
            for worker in (at_ann, at_bob):
                self._expect(worker)
        with stage("the server's host hangs: another takes over, its client goes on"):
            self._churn(at_ann, at_bob, seed=1)
            ann.pause()
            self._serve(bob, "second", epoch=2)
            self._enough(at_bob)
            self._attached(at_bob, epoch=2)
            self._expect(at_bob)
        with stage("it comes back: its server steps down, its client attaches by itself"):
            ann.resume()
            first.receive_until("taken this pool over")
            self._enough(at_ann)
            self._attached(at_ann, epoch=2)
            self._put(at_ann, LATER)
            for worker in (at_ann, at_bob):
                self._expect(worker)
        with stage("the server's host dies: taken over again, the client goes on"):
            self._churn(at_ann, at_bob, seed=3)
            bob.kill()
            third = self._serve(ann, "third", epoch=3)
            self._enough(at_ann)
            self._attached(at_ann, epoch=3)
            self._put(at_ann, LAST)
            self._expect(at_ann)
        with stage("the dead host is declared gone: nothing is quarantined, nothing is damaged"):
            at_ann.end()
            third.terminate()
            fourth = self._serve(ann, "fourth", "--declare-gone", epoch=4)
            held = ann.run("stat", BELUGA, "stat", "--json", "--host", 1, *POOL)
            demand(ann, '"held_bytes": 0' in held, f"space is still quarantined: {held}")
            fourth.terminate()
            ann.run("check", BELUGA, "pool", "check", "--payload", *POOL)

    def _verify(self) -> None:
        """Run both sides of the acceptance test."""
        words = ("verify", *POOL, "--seconds", 1, "--timeout", WAIT_S, "--peer", "--role")
        sides = [
            self.ann.start("verify-a", BELUGA, *words, "a"),
            self.bob.start("verify-b", BELUGA, *words, "b"),
        ]
        for side in sides:
            side.await_exit()

    def _serve(self, guest: Guest, name: str, *words: str, epoch: int) -> GuestProcess:
        number = 1 if guest is self.ann else 2
        server = guest.start(name, BELUGA, "serve", "--host", number, *words, *POOL)
        received = server.receive_until("serving")
        demand(guest, f"epoch {epoch};" in received, f"not epoch {epoch}: {received}")
        return server

    def _worker(self, guest: Guest, name: str) -> GuestProcess:
        worker = guest.start(name, WORKER, 1 if guest is self.ann else 2, *NODES)
        worker.receive_until("ready")
        return worker

    def _put(self, worker: GuestProcess, numbers: tuple[int, int]) -> None:
        """Store these blocks; on a slow machine a session may meanwhile be considered dead."""
        wanted = set(range(*numbers))
        for _ in range(TRIES):
            there = set(worker.request(f"put {numbers[0]} {numbers[1]}")["there"])
            self.there |= there
            if there == wanted:
                return
        raise worker.guest.error(f"{worker.name}: put {numbers}: only {sorted(there)}")

    def _expect(self, worker: GuestProcess) -> None:
        """Check that every committed block is present and correct; a first miss is legal."""
        for first, end in (ANNS, BOBS, LATER, LAST, CHURNED):
            wanted = self.there & set(range(first, end))
            for _ in range(TRIES):
                result = worker.request(f"get {first} {end}")
                self._whole(worker, result)
                wanted -= set(result["there"])
                if not wanted:
                    break
            demand(worker.guest, not wanted, f"{worker.name} misses {sorted(wanted)}")

    def _churn(self, *workers: GuestProcess, seed: int) -> None:
        """Make both put and get until :meth:`_enough`; both have started when this returns."""
        for number, worker in enumerate(workers):
            worker.send(f"churn {CHURNED[0]} {CHURNED[1]} {seed + number}")
        for worker in workers:
            worker.receive()

    def _enough(self, worker: GuestProcess) -> None:
        result = worker.request("enough")
        self._whole(worker, result)
        self.there.update(result["there"])

    def _whole(self, worker: GuestProcess, result: dict[str, Any]) -> None:
        """Check that no block came with wrong bytes, and that none was damaged, even if the cache
        detected it.
        """
        wrong, changed = result["wrong"], result["changed"]
        demand(worker.guest, wrong == 0, f"{worker.name} got {wrong} wrong blocks")
        demand(worker.guest, changed == 0, f"{worker.name} met {changed} blocks that had changed")

    def _attached(self, worker: GuestProcess, epoch: int) -> None:
        result = worker.request("stat")
        demand(
            worker.guest, result["epoch"] == epoch, f"{worker.name} is with epoch {result['epoch']}"
        )
        ran_out = result["ran_out"]
        demand(worker.guest, ran_out <= RAN_OUT_MAX, f"{worker.name}: {ran_out} calls ran out")
        if ran_out:
            print(f"  {worker.name}: {ran_out} call ran out, and was tried again", flush=True)


def demand(guest: Guest, holds: bool, otherwise: str) -> None:
    if not holds:
        raise guest.error(otherwise)


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Print that a stage has passed, and how long it took."""
    start = time.monotonic()
    try:
        yield
    except GuestError:
        print(f"  FAILED after {time.monotonic() - start:.1f} s: {what}", flush=True)
        raise
    print(f"  {time.monotonic() - start:5.1f} s  {what}", flush=True)


def one_run(machine_image: Image, keep: bool) -> str | None:
    """Return the error, or None."""
    shm = Path("/dev/shm")
    roomy = os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > 4 * DEVICE_SIZE
    directory = Path(tempfile.mkdtemp(prefix="two-hosts-", dir=shm if roomy else None))
    try:
        with ExitStack() as guests:
            Run(machine_image, directory, guests).play()
    except GuestError as error:
        return str(error)
    finally:
        if keep:
            print(f"  kept: {directory}")
        else:
            shutil.rmtree(directory)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="two-hosts", description=__doc__)
    parser.add_argument("--runs", type=int, default=1, metavar="N")
    parser.add_argument("--keep", action="store_true", help="leave devices and consoles behind")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # clean up first
    start = time.monotonic()
    try:
        machine_image = image()
    except UnavailableError as error:
        print(f"two-hosts: skipped: {error}", file=sys.stderr)
        return SKIPPED
    if machine_image.made:
        print(f"kernel and initial file system made in {time.monotonic() - start:.1f} s")
    passed = 0
    for number in range(1, options.runs + 1):
        print(f"run {number} of {options.runs}", flush=True)
        start = time.monotonic()
        failure = one_run(machine_image, options.keep)
        if failure is not None:
            print(f"run {number} FAILED: {failure}", flush=True)
            continue
        passed += 1
        print(f"  {time.monotonic() - start:5.1f} s  in all", flush=True)
    print(f"two hosts: {passed} of {options.runs} runs passed")
    return 0 if passed == options.runs else 1


if __name__ == "__main__":
    run_program(main)
