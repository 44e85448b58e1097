# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The parent's end of engines and servers: it starts them, sends them commands, and ends them.

Every child has its own session and log file. It is killed when the thread that started it dies
(``PR_SET_PDEATHSIG``), and with all its own children when it is closed. Ctrl-C reaches only the
parent, which closes its children.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from beluga.child import command
from beluga.errors import BelugaError

from ..harness.machine import cores
from .model import Size

# This runs before the program itself, because no Python may run between fork and exec in a threaded
# parent.
_END_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
_TAIL_LINES = 12
_END_S = 20.0

READY_S = 300.0
"""The time for an engine to start on a slow machine that starts several."""


class ChildError(BelugaError):
    """A child ended or was silent for too long. The text has the end of its log."""


_ChildT = TypeVar("_ChildT", bound="Child")


class Child:
    """A process in its own session, whose output goes to ``log``."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        with_pipes: bool = False,
    ) -> None:
        self.name = log.stem
        self._log = log
        pipe = subprocess.PIPE if with_pipes else None
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-ISc", _END_WITH_PARENT, str(os.getpid()), *map(str, command)],
                env=dict(environment) if environment is not None else None,
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or errors,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The id of the process and of its session."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def wait_for(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait until ``condition`` is true. Raises ChildError if the process ends before, or after
        ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if not self.running:
                raise self.failed(f"ended with status {self._process.returncode}")
            if time.monotonic() > deadline:
                raise self.failed(f"no {what} within {timeout_s:.0f} s")
            time.sleep(0.05)

    def failed(self, what: str) -> ChildError:
        """Return an error with the event and the end of the log."""
        lines = self.log().splitlines()[-_TAIL_LINES:]
        return ChildError("\n    ".join([f"{self.name}: {what}; its log ends:", *lines]))

    def log(self) -> str:
        """Return its whole output so far."""
        return self._log.read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process only."""
        self._process.send_signal(number)

    def close(self) -> None:
        """End it: close its input or send SIGTERM, then kill its whole session."""
        if self._process.stdin:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        elif self.running:
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_END_S)
        self.kill()

    def kill(self) -> None:
        """Kill it and all its own children at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()

    def __enter__(self: _ChildT) -> _ChildT:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()


class Engine(Child):
    """A vLLM engine (``engine.py``). ``options`` are the keyword arguments of ``vllm.LLM``.

    Several engines start at the same time; :meth:`ready` waits for one. ``python`` is from an
    environment with vLLM.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        log: Path,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
    ) -> None:
        super().__init__(
            [*wrapper, *command("beluga_bench.vllm.engine", json.dumps(options), python=python)],
            log=log,
            environment=environment_of(log.parent) | dict(environment or {}),
            with_pipes=True,
        )
        self._unread = b""

    def ready(self, timeout_s: float = READY_S) -> None:
        """Wait until it accepts commands. Raises ChildError."""
        self.reply(timeout_s)

    def call(self, do: str, timeout_s: float = 600.0, **arguments: Any) -> dict[str, Any]:
        """Send a command of ``engine.py`` and return its reply. Raises ChildError, also if it
        failed.
        """
        self.send(do, **arguments)
        return self.reply(timeout_s)

    def generate(self, tokens: list[int], **arguments: Any) -> dict[str, Any]:
        """Run one prompt. Returns its output, with the connector's ``figures`` during the call."""
        reply = self.call("generate", prompts=[tokens], **arguments)
        return {**reply["outputs"][0], "figures": reply["figures"]}

    def send(self, do: str, **arguments: Any) -> None:
        """Send a command. A call of :meth:`reply` must follow."""
        assert self._process.stdin  # noqa: S101
        line = json.dumps({"do": do, **arguments}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except OSError:
            raise self.failed("has ended") from None

    def reply(self, timeout_s: float) -> dict[str, Any]:
        """Return the next reply. Raises ChildError."""
        assert self._process.stdout  # noqa: S101
        source = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([source], [], [], left_s)[0]:
                raise self.failed(f"silent for {timeout_s:.0f} s")
            read = os.read(source, 1 << 16)
            if not read:
                raise self.failed(f"ended with status {self._process.wait()}")
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise self.failed(message["error"])
        return message


def environment_of(folder: Path) -> dict[str, str]:
    """Return the environment of every engine: equal thread counts, no downloads and no reports.

    vLLM's caches and settings go to ``folder``. Otherwise a worker would use fewer threads without
    a connector than with one, and its outputs would differ by rounding.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    threads = cores()
    return inherited | {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, threads)),
        "OMP_NUM_THREADS": str(len(threads)),
        # this keeps the connector's counters in the same process
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_CONFIG_ROOT": str(folder / "config"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
    }


def options_of(  # noqa: PLR0913  all named
    model: Path,
    size: Size,
    *,
    tokens: int,
    connector: Mapping[str, Any] | None = None,
    dtype: str = "bfloat16",
    block_tokens: int = 128,
) -> dict[str, Any]:
    """Return options of ``vllm.LLM`` for prompts of that many tokens, with KV memory for two and a
    half.
    """
    context = -(-tokens // block_tokens) * block_tokens + 2 * block_tokens
    element_bytes = {"bfloat16": 2, "float32": 4}[dtype]
    return {
        "model": str(model),
        "dtype": dtype,
        "block_size": block_tokens,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256_cbor",
        "max_model_len": context,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": int(context * 2.5) * size.token_bytes(element_bytes),
        "disable_log_stats": False,  # the statistics include the time to the first token
        "kv_transfer_config": None if connector is None else dict(connector),
    }
