# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Real vLLM engines for the slow tests, on a pool with a server."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from beluga_bench.vllm.model import SIZES
from beluga_bench.vllm.process import Child, Engine, options_of
from beluga_bench.vllm.prompts import prompt
from support.forge import read, write

from beluga import BelugaError, KVCache, Namespace, Pool
from beluga.child import command
from beluga.index import COMMITTED, IndexClient, IndexStat, check_pool, read_entries
from beluga.kvcache import known_namespaces
from beluga.rpc import Client

FOLDER = Path(__file__).parent
BLOCK = 128
TOKENS = 1281  # ten blocks and a token
SERVER_S = SAVED_S = 60.0


class Site:
    """A pool with a server process, and engines on it."""

    def __init__(self, folder: Path, devices: list[Path], python: str, made: Path) -> None:
        self.folder, self.python, self._model = folder, python, made
        self.paths = devices
        self.hashes = folder / "hashes"
        self._server: Child | None = None
        self._count = 0

    def serve(self, *options: str) -> None:
        """Start the server with these options, and wait until it responds."""
        words = ("serve", *self.pool_options(), *options)
        self._server = Child(command("beluga.cli.main", *words), log=self.folder / "server.log")
        self._server.wait_for(self._answers, SERVER_S, "answer")

    def pool_options(self) -> list[str]:
        return [word for path in self.paths for word in ("--pool", str(path))]

    def _answers(self) -> bool:
        try:
            with Pool.open(self.paths) as pool, Client(pool, timeout_s=0.5) as client:
                client.ping()
        except BelugaError:
            return False
        return True

    def kill_server(self) -> None:
        assert self._server is not None
        self._server.signal(signal.SIGKILL)
        self._server.kill()

    def engine(
        self,
        name: str,
        *,
        connector: dict[str, Any] | None,
        crash: str = "",
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> Engine:
        """Start an engine. ``connector`` has its settings, or is None for an engine without one."""
        environment = (
            (environment or {})
            | {
                "PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]),
                "BELUGA_TEST_HASHES": str(self.hashes),
                "PYTHONFAULTHANDLER": "1",
            }
            | ({"BELUGA_CRASH": crash} if crash else {})
        )
        transfer = None
        if connector is not None:
            transfer = self.connector("HashingConnector", **connector)
        given = options_of(
            self._model, SIZES["tiny"], tokens=TOKENS, connector=transfer, dtype="float32"
        )
        self._count += 1
        return Engine(
            given | options,
            log=self.folder / f"{self._count}-{name}.log",
            python=self.python,
            environment=environment,
        )

    def connector(self, name: str, **settings: Any) -> dict[str, Any]:
        """Return the configuration of a connector of ``siblings.py`` on this pool."""
        pool = {"pool": ":".join(map(str, self.paths)), "timeout_ms": 2000, "retry_s": 0.2}
        return child_of(name, **(pool | settings))

    def check(self) -> subprocess.CompletedProcess[str]:
        """Run ``beluga pool check --payload`` on the pool while it is served."""
        return subprocess.run(
            command("beluga.cli.main", "pool", "check", "--payload", *self.pool_options()),
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def stat(self) -> IndexStat:
        """Return the server's counters."""
        with Pool.open(self.paths) as pool, Client(pool, timeout_s=5) as client:
            return IndexClient(client).stat()

    @property
    def model_name(self) -> str:
        """The name under which the engines serve the model."""
        return str(self._model)

    def remove_all(self) -> None:
        """Remove all blocks from the pool."""
        with Pool.open(self.paths) as pool, Client(pool, timeout_s=5) as client:
            for lines in read_entries(pool, check_pool(pool).half):
                keys = lines["key"][lines["state"] == COMMITTED]
                IndexClient(client).remove(np.ascontiguousarray(keys))

    def pinned(self) -> int:
        """Return how many blocks sessions hold."""
        return self.stat().pinned_count

    def damage(self, step: int = 64 << 10) -> None:
        """Change a bit of the pool's content every ``step`` bytes."""
        with Pool.open(self.paths) as pool:
            for offset in range(pool.geometry.data_offset, pool.geometry.size, step):
                line = read(pool, offset)
                write(pool, offset, bytes([line[0] ^ 1]) + line[1:])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def child_of(name: str, **settings: Any) -> dict[str, Any]:
    """Return the configuration of a connector of ``siblings.py``."""
    both = {"kv_connector_module_path": "siblings", "kv_role": "kv_both"}
    return {"kv_connector": name, **both, "kv_connector_extra_config": settings}


def several(*children: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of vLLM's connector of several others."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


@contextlib.contextmanager
def made_site(
    root: Path, python: str, model: Path, device_size: int = 40 << 20, **geometry: Any
) -> Iterator[Site]:
    """Make a pool of two devices, which is not served yet."""
    folder = Path(tempfile.mkdtemp(prefix="beluga-vllm-test-", dir=root))
    devices = [folder / "a", folder / "b"]
    Pool.create(devices, device_size=device_size, lane_count=32, **geometry).close()
    site = Site(folder, devices, python, model)
    try:
        yield site
    finally:
        site.close()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def running(engines: Iterable[Engine]) -> Iterator[None]:
    """Wait until engines are ready, and kill them at the end."""
    engines = list(engines)
    try:
        for engine in engines:
            engine.ready()
        yield
    finally:
        for engine in engines:
            engine.kill()


def wait_until(condition: Any, timeout_s: float, what: str) -> None:
    """Poll until the condition is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


class Engines:
    """Three engines: one only computes, one saves and loads, and one loads in parallel to its
    forward passes.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self.plain = site.engine("plain", connector=None)
        self.a = site.engine("a", connector={})
        self.b = site.engine("b", connector={"load": "async"})
        self.all = (self.plain, self.a, self.b)

    def recomputed(self, tokens: list[int]) -> list[int]:
        """Return the answer of an engine without any cache."""
        forget(self.plain)
        answer: list[int] = self.plain.generate(tokens)["tokens"]
        return answer

    def saved(self, tokens: list[int], engine: Engine | None = None) -> dict[str, Any]:
        """Compute a prompt and save its blocks."""
        engine = engine or self.a
        before = done(engine)
        reply = engine.generate(tokens)
        wanted = len(tokens) // BLOCK - reply["cached_tokens"] // BLOCK
        wait_until(lambda: done(engine) >= before + wanted, SAVED_S, "saving")
        return reply


def done(engine: Engine) -> float:
    """Return how many blocks need no save any more, for any reason."""
    engine.call("idle")
    figures = engine.call("figures")["figures"]
    return (
        sum(figures[f"save_{what}_blocks"] for what in ("present", "skipped"))
        + (figures["save_blocks"])
    )


def forget(engine: Engine) -> None:
    """Empty the engine's own prefix cache after its saves have ended."""

    def emptied() -> bool:
        engine.call("idle")
        return bool(engine.call("reset")["reset"])

    wait_until(emptied, SAVED_S, "the engine's own cache to be emptied")


def check_hashes(site: Site, *, salted: bool = False, since: int = 0) -> int:
    """Check that every loaded block has exactly the bytes that were saved under its name, and that
    no two names that were saved after line ``since`` have the same bytes, except for prompts that
    were ``salted``. Returns how many loads there were.
    """
    saved: dict[str, set[str]] = {}
    recent: set[str] = set()
    loads = 0
    for number, line in enumerate(site.hashes.read_text().splitlines()):
        what, digest, content = line.split()
        if what == "save":
            saved.setdefault(digest, set()).add(content)
            if number >= since and not salted:
                recent.add(digest)
        else:
            loads += 1
            assert content in saved.get(digest, set()), f"{digest}: loaded what nobody saved"
    owner: dict[str, str] = {}
    for digest in recent:
        for content in saved[digest]:
            assert owner.setdefault(content, digest) == digest, "one block under two names"
    return loads


def in_vllm(python: str, function: str, *words: str, given: Any = None) -> Any:
    """Run a function of ``vllm_role.py`` with vLLM's Python, and ``given`` as its input. Returns
    what it prints.
    """
    ran = subprocess.run(
        [python, FOLDER / "vllm_role.py", function, *words],
        input=json.dumps(given),
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


def hybrid_models(python: str, folder: Path, *names: str) -> Path:
    """Make models of ``vllm_role.py`` in a folder, and return it."""
    in_vllm(python, "hybrid_models", str(folder), *names)
    return folder


def small(count: int, seed: int) -> list[int]:
    """Return a prompt in the small vocabulary of these models."""
    return [10 + token % 490 for token in prompt(count, seed=seed)]


HYBRID_TOKENS = 1100


def hybrid_prompt(name: str, seed: int) -> list[int]:
    """Return a prompt for one hybrid model."""
    return small(HYBRID_TOKENS, zlib.crc32(name.encode()) + seed)


def start_hybrid(site: Site, model: Path, name: str, **more: Any) -> Engine:
    given = {
        "connector": {},
        "model": str(model),
        "skip_tokenizer_init": True,
        "max_model_len": 4096,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 64 << 20,
        "dtype": "bfloat16",
    }
    return site.engine(name, **(given | more))


def answer(reply: dict[str, Any]) -> Any:
    """Return what must be equal, bit for bit."""
    return reply["tokens"], reply["logprobs"]


def saved_digests(site: Site) -> list[bytes]:
    """Return the digests of all blocks that engines have saved, in order."""
    lines = [line.split() for line in site.hashes.read_text().splitlines()]
    return [bytes.fromhex(digest) for what, digest, _ in lines if what == "save"]


def remove(site: Site, *digests: bytes) -> int:
    """Remove blocks from the pool and its tiers, of every engine. Returns how many there were."""
    with Pool.open(site.paths) as pool:
        removed = 0
        for namespace in known_namespaces(pool.runtime_dir):
            with KVCache(pool, namespace=Namespace(namespace.fields)) as cache:
                removed += cache.remove(list(digests))
    return removed
