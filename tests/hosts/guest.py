# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A virtual host with devdax devices, which are files of this machine that other guests share.

The guest's memory that lies on those files is declared "soft reserved": its kernel leaves it alone
and offers it as /dev/dax0.0, /dev/dax1.0 in the order of the files. That is also what CXL memory
set up by firmware looks like. Every wait is bounded and ends in a GuestError with a clear line.
"""

from __future__ import annotations

import json
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from image import LINES_FROM_HOST, ROOT, Image

MIB = 1 << 20
DEVICE_SIZE = 64 * MIB
RAM = 768 * MIB  # with less, the guest reads its programs again and again
GAP = 16 * MIB  # between devices: adjacent soft-reserved ranges would be one device
ABOVE = 4 << 30  # where memory continues; firmware and initrd lie below, outside the pool
SOFT_RESERVED = 0xEFFFFFFF
WAIT_S = 420.0  # timeout of one reply: software emulation on a busy machine
TAIL = 30  # lines of a guest's console in the report of a failure


class GuestError(Exception):
    """A guest or a process in it did not do what the test requires."""


class Guest:
    """Boots on construction; :meth:`ready` waits for it."""

    def __init__(self, name: str, image: Image, devices: Sequence[Path], directory: Path) -> None:
        self.name = name
        self._console = directory / f"{name}.console"
        self._messages: dict[str, queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)
        self._qemu = subprocess.Popen(
            _command(image, devices, self._console),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def ready(self) -> None:
        """Wait until processes can be started in it."""
        self._receive("init", "boot")
        agent = shlex.join([sys.executable, str(Path(__file__).with_name("agent.py"))])
        self._send(
            f"cd {shlex.quote(str(ROOT))}; export HOME=/dev/shm TMPDIR=/dev/shm "
            f"XDG_RUNTIME_DIR=/dev/shm PYTHONDONTWRITEBYTECODE=1; "
            f"exec {agent} {LINES_FROM_HOST}"
        )
        self._receive("agent", "start its agent")

    def start(self, name: str, main: str, *arguments: object) -> GuestProcess:
        """Start a process of the guest that runs ``main``, MODULE:FUNCTION; ``name`` is used
        once.
        """
        self._command(start=name, main=main, arguments=[str(word) for word in arguments])
        return GuestProcess(self, name)

    def run(self, name: str, main: str, *arguments: object) -> str:
        """Run a process to its end: return its output. Raises GuestError if it fails."""
        process, lines = self.start(name, main, *arguments), []
        while isinstance(line := process.receive_any(), str):
            lines.append(line)
        if line != 0:
            raise self.error(f"{name} ended with {line}: {' | '.join(lines[-5:])}")
        return "\n".join(lines)

    def pause(self) -> None:
        """Stop it, like a host that hangs."""
        self._qemu.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume it."""
        self._qemu.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it, like a host whose power fails."""
        self._qemu.kill()
        self._qemu.wait()

    def error(self, what: str) -> GuestError:
        """Return an error with the end of the kernel's log."""
        try:
            text = self._console.read_text(errors="replace")
        except OSError:
            text = "(no console)"
        tail = "\n".join(f"  {self.name}| {line}" for line in text.splitlines()[-TAIL:])
        return GuestError(f"guest {self.name}: {what}\n{tail}")

    def _listen(self) -> None:
        assert self._qemu.stdout
        for line in self._qemu.stdout:
            try:
                message = json.loads(line)
            except ValueError:  # the guest's first line, or a message of QEMU
                message = {"of": "init", "line": line.rstrip()}
            self._messages[message["of"]].put(message)
        for name in (*list(self._messages), "init", "agent"):
            self._messages[name].put({"gone": True})

    def _receive(self, name: str, doing: str) -> dict[str, Any]:
        end = time.monotonic() + WAIT_S
        while True:
            try:
                message: dict[str, Any] = self._messages[name].get(timeout=1.0)
                break
            except queue.Empty:
                if time.monotonic() > end:
                    raise self.error(f"{doing}: no answer in {WAIT_S:.0f} s") from None
                if self._qemu.poll() is not None:
                    raise self.error(f"{doing}: QEMU ended ({self._qemu.returncode})") from None
        if "gone" in message:
            raise self.error(f"{doing}: QEMU ended")
        if name == "init" and message["line"] != "up":
            raise self.error(f"{doing}: {message['line']}")
        return message

    def _send(self, line: str) -> None:
        assert self._qemu.stdin
        try:
            self._qemu.stdin.write(line + "\n")
        except OSError:
            raise self.error("QEMU has ended") from None

    def _command(self, **message: object) -> None:
        self._send(json.dumps(message))


class GuestProcess:
    """A process in a guest, with input and output by lines."""

    def __init__(self, guest: Guest, name: str) -> None:
        self.guest = guest
        self.name = name

    def receive_any(self) -> str | int:
        """Return its next line, or its exit status."""
        message = self.guest._receive(self.name, self.name)
        return message["line"] if "line" in message else int(message["exit"])

    def receive(self) -> str:
        """Return its next line. Raises GuestError if it has ended."""
        received = self.receive_any()
        if isinstance(received, int):
            raise self.guest.error(f"{self.name} ended with {received}")
        return received

    def receive_until(self, word: str) -> str:
        """Return the next line that contains ``word``. Raises GuestError with the others if it
        ends.
        """
        others: list[str] = []
        while isinstance(received := self.receive_any(), str):
            if word in received:
                return received
            others.append(received)
        shown = " | ".join(others[-5:])
        raise self.guest.error(f"{self.name} ended with {received} before '{word}': {shown}")

    def send(self, line: str) -> None:
        self.guest._command(to=self.name, line=line)

    def request(self, line: str) -> dict[str, Any]:
        """Send a line. Returns the reply, which is JSON."""
        self.send(line)
        received = self.receive()
        try:
            answer: dict[str, Any] = json.loads(received)
        except ValueError:  # a traceback
            lines = [received]
            while isinstance(more := self.receive_any(), str):
                lines.append(more)
            shown = " | ".join(lines[-5:])
            raise self.guest.error(f"{self.name}, after '{line}': {shown}") from None
        return answer

    def end(self) -> None:
        """Let it end by itself, with status 0."""
        self.guest._command(end=self.name)
        self.await_exit()

    def terminate(self) -> None:
        """End it as an operator does, with SIGTERM."""
        self.guest._command(terminate=self.name)
        self.await_exit()

    def await_exit(self) -> None:
        """Wait until it ends, with status 0."""
        lines: list[str] = []
        while isinstance(received := self.receive_any(), str):
            lines.append(received)
        if received != 0:
            raise self.guest.error(f"{self.name} ended with {received}: {' | '.join(lines[-5:])}")


def _command(image: Image, devices: Sequence[Path], console: Path) -> list[str]:
    """Make QEMU's command line. Two CPUs are possible, though there is one: else QEMU drops the
    fences.
    """
    total = RAM + sum(DEVICE_SIZE + GAP for _ in devices)
    command = [
        *("setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64"),
        *("-machine", f"q35,max-ram-below-4g={RAM}", "-accel", "tcg,thread=multi", "-cpu", "max"),
        *("-smp", "1,maxcpus=2", "-m", f"{total // MIB}M"),
        *("-nodefaults", "-display", "none", "-no-reboot", "-serial", f"file:{console}"),
        *("-chardev", "stdio,id=agent,signal=off", "-serial", "chardev:agent"),
        *("-object", f"memory-backend-ram,id=ram,size={RAM}"),
        *("-numa", "node,nodeid=0,cpus=0-1,memdev=ram"),
    ]
    words, at = [], ABOVE
    for index, device in enumerate(devices):
        shared = f"memory-backend-file,id=pool{index},size={DEVICE_SIZE},mem-path={device},share=on"
        apart = f"memory-backend-ram,id=gap{index},size={GAP}"
        command += ["-object", shared, "-numa", f"node,nodeid={2 * index + 1},memdev=pool{index}"]
        command += ["-object", apart, "-numa", f"node,nodeid={2 * index + 2},memdev=gap{index}"]
        words.append(f"{DEVICE_SIZE}%{at:#x}-1+{SOFT_RESERVED:#x}")
        words.append(f"{GAP}%{at + DEVICE_SIZE:#x}-1+2")
        at += DEVICE_SIZE + GAP
    return [
        *command,
        *("-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap"),
        *("-device", "virtio-9p-pci,bus=pcie.0,fsdev=root,mount_tag=hostroot"),
        *("-kernel", str(image.kernel), "-initrd", str(image.initrd), "-append"),
        "console=ttyS0 quiet nokaslr no_timer_check panic=-1 memmap=" + ",".join(words),
    ]
