# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``beluga explain`` names the cause of each of ten planted misses.

Each is caused as in production: engines' own namespaces (those of vLLM's connector),
other processes that store, write and die, a pool that is full, a server that is killed, memory that
fails. The command runs in a process of its own, before and after a restart of the server.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from beluga import KVCache, Namespace, Pool
from beluga.connectors.vllm.identity import namespace as vllm_namespace
from beluga.index import IndexClient
from beluga.kvcache import fold

pytestmark = pytest.mark.slow


class PretrainedConfig:
    """A model's configuration as transformers keeps it."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def to_dict(self) -> dict[str, Any]:
        return dict(self._fields)


Run = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]
Server = subprocess.Popen

KEY = bytes(range(32))  # as vLLM's hash of a block
SIZE = 4096
LINES = 8  # blocks that the table has room for
FORGOTTEN = 200 * LINES  # evicted blocks until the server drops its records of earlier ones


def engine(
    *,
    model: str = "org/model",
    dtype: str = "torch.bfloat16",
    kv_dtype: str = "auto",
    layout: str = "(2, 16, 8, 128)",
    rank: int = 0,
    ranks: int = 2,
    salt: str = "",
) -> Namespace:
    """The namespace that vLLM's connector makes of one rank of an engine."""
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(
            model=model,
            max_model_len=4096,
            revision="main",
            hf_config=PretrainedConfig({"hidden_size": 4096, "dtype": dtype}),
            quantization=None,
            dtype=dtype,
            seed=0,
        ),
        cache_config=SimpleNamespace(
            cache_dtype=kv_dtype, block_size=16, prefix_caching_hash_algo="sha256"
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        load_config=SimpleNamespace(load_format="auto"),
    )
    form: Any = SimpleNamespace(declared=layout, device="cpu")
    return vllm_namespace(
        config,
        version="0.11.0",
        layout=form,
        packing="none",
        layers={"layer.0": "full"},
        part=f"{rank}/{ranks}",
        pp_rank=0,
        salt=salt,
    )


STORE = """
import json, sys
from beluga import KVCache, Namespace, Pool
fields, salt, size = json.loads(sys.argv[1])
with Pool.open(sys.argv[3:]) as pool:
    with KVCache(pool, namespace=Namespace(fields, salt=salt)) as cache:
        digests = [bytes.fromhex(text) for text in sys.argv[2].split(",")]
        for digest in digests:
            assert cache.put([digest], [bytes([7]) * size]).refused == 0
"""


class World:
    """A served pool of :data:`LINES` blocks, engines that store, and the command."""

    def __init__(self, start: Start, run: Run, paths: list[str]) -> None:
        self._start, self._run, self.paths = start, run, paths
        self._options = [word for path in paths for word in ("--pool", path)]
        self.serve()

    def serve(self) -> None:
        self.server = self._start("serve", *self._options)
        assert self.server.stderr
        assert self.server.stderr.readline().startswith("serving, epoch")

    def kill(self) -> None:
        """Kill the server with SIGKILL, as the kernel's out-of-memory killer does."""
        self.server.send_signal(signal.SIGKILL)
        self.server.wait()

    def store(
        self, namespace: Namespace, *digests: bytes, salt: str = "", size: int = SIZE
    ) -> None:
        """Store blocks from a process of their own."""
        label = json.dumps([dict(namespace.fields), salt, size])
        names = ",".join(digest.hex() for digest in digests or (KEY,))
        command = [sys.executable, "-c", STORE, label, names, *self.paths]
        subprocess.run(command, check=True, timeout=60)

    def crowd(self, count: int = LINES) -> None:
        """Store other blocks until the present ones are evicted."""
        self.store(Namespace({"name": "others"}), *(n.to_bytes(16, "big") for n in range(count)))

    def explain(self, namespace: Namespace, *, salt: str = "") -> dict[str, str]:
        """Explain KEY as an operator does, with the fields of the engine that misses it."""
        fields = [f"--field={name}={value}" for name, value in namespace.fields.items()]
        options = ["--salt", salt] if salt else []
        ended = self._run("explain", KEY.hex(), *fields, *options, *self._options, "--json")
        assert ended.stderr == ""
        (explanation,) = json.loads(ended.stdout)
        assert ended.returncode == (explanation["state"] == "miss")
        return dict(explanation)

    def remove(self, namespace: Namespace) -> None:
        fields = [f"--field={name}={value}" for name, value in namespace.fields.items()]
        assert self._run("rm", KEY.hex(), *fields, *self._options).returncode == 0

    def cause(self, namespace: Namespace, *, salt: str = "") -> str:
        return self.explain(namespace, salt=salt)["cause"]


@pytest.fixture
def world(start: Start, run: Run, shm: Path) -> Iterator[World]:
    paths = [str(shm / "a")]
    Pool.create(paths, device_size=24 << 20, max_blocks=LINES).close()
    yield World(start, run, paths)


@pytest.mark.parametrize("killed", [False, True], ids=["served", "after a restart"])
@pytest.mark.parametrize(
    ("stored", "cause", "message"),
    [
        (engine(model="org/other"), "namespace", "config model_config is '"),
        (engine(layout="(16, 2, 8, 128)"), "layout", "layout is '(16, 2, 8, 128)' there"),
        (engine(dtype="torch.float16"), "dtype", "dtype is 'torch.float16' there"),
        (
            engine(kv_dtype="fp8", layout="(2, 16, 8, 64)"),
            "dtype",
            "kv_dtype is 'fp8' there and 'auto' here, layout is",
        ),
        (engine(rank=1), "rank", "tp is '1/2' there and '0/2' here"),
        (engine(ranks=4, layout="(2, 16, 4, 128)"), "rank", "tp is '0/4' there and '0/2' here"),
    ],
    ids=["namespace", "layout", "dtype", "kv dtype", "rank", "ranks"],
)
def test_blocks_of_another_engine_are_explained(
    world: World, stored: Namespace, cause: str, message: str, killed: bool
) -> None:
    world.store(stored)
    world.store(engine(), KEY[::-1])  # the queried engine has stored blocks, too
    if killed:
        world.kill()
        world.serve()
    assert world.explain(stored)["cause"] == "stored"
    explanation = world.explain(engine())
    assert (explanation["state"], explanation["cause"]) == ("miss", cause)
    assert message in explanation["text"]


def test_the_most_similar_namespace_is_shown(world: World) -> None:
    for stored in (engine(model="org/a", rank=1), engine(model="org/b"), engine(rank=1)):
        world.store(stored)
    assert world.cause(engine()) == "rank"


def test_a_salt_is_explained(world: World) -> None:
    world.store(engine(), salt="tenant")
    assert world.cause(engine()) == "salt"
    assert world.cause(engine(), salt="wrong") == "salt"
    assert world.cause(engine(), salt="tenant") == "stored"
    # with the salt, the output has more details
    explanation = world.explain(engine(rank=1), salt="tenant")
    assert (explanation["cause"], "tp is '0/2' there and '1/2' here" in explanation["text"]) == (
        "rank",
        True,
    )
    assert "no salt there" not in explanation["text"]
    world.kill()
    world.serve()
    assert world.cause(engine()) == "salt"
    assert world.cause(engine(rank=1), salt="tenant") == "rank"


def test_a_block_evicted_by_a_full_table_is_explained(world: World) -> None:
    """A new block takes the table line of the block evicted for it, so only the server has a record
    of the eviction.
    """
    world.store(engine())
    world.crowd(LINES)
    explanation = world.explain(engine())
    assert (explanation["state"], explanation["cause"]) == ("miss", "evicted")
    assert "the block table was full" in explanation["text"]
    world.kill()
    world.serve()
    assert world.cause(engine()) == "never"


def test_an_eviction_without_a_record_is_a_suspected_cause(world: World) -> None:
    world.store(engine())
    world.crowd(FORGOTTEN)
    explanation = world.explain(engine())
    assert (explanation["state"], explanation["cause"]) == ("miss", "never")
    assert "blocks were evicted since this server took over" in explanation["text"]


def test_a_block_evicted_by_larger_blocks_is_explained(world: World) -> None:
    """Space runs out before table lines do: the line of the evicted block still shows it."""
    world.store(engine(), size=4 << 20)
    others = [n.to_bytes(16, "big") for n in range(6)]
    world.store(Namespace({"name": "others"}), *others, size=4 << 20)
    explanation = world.explain(engine())
    assert (explanation["state"], explanation["cause"]) == ("miss", "evicted")
    assert "evicted to make room" in explanation["text"]
    world.kill()
    world.serve()
    explanation = world.explain(engine())
    assert explanation["cause"] == "evicted"
    assert "before this server took over" in explanation["text"]


def test_a_block_that_is_being_written_is_pending_until_its_writer_dies(world: World) -> None:
    code = (
        "import sys\n"
        "from beluga import Client, Pool\n"
        "from beluga.index import IndexClient\n"
        "import numpy as np\n"
        "with Pool.open(sys.argv[2:]) as pool, Client(pool) as client:\n"
        "    keys = np.array([[int(text) for text in sys.argv[1].split()]], np.uint64)\n"
        "    IndexClient(client).reserve(keys, length=4096)\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    words = " ".join(str(word) for word in fold(engine(), [KEY])[0])
    with subprocess.Popen(
        [sys.executable, "-c", code, words, *world.paths],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout and writer.stdout.readline() == "ready\n"
        explanation = world.explain(engine())
        assert (explanation["state"], explanation["cause"]) == ("pending", "pending")
        writer.kill()
    assert world.cause(engine()) == "never"


def test_a_block_of_the_previous_epoch_is_explained(world: World) -> None:
    """The next server had the block, evicted it, dropped its record and reused its line: only the
    half of the killed server shows that the block existed.
    """
    world.store(engine())
    world.kill()
    world.serve()
    assert world.cause(engine()) == "stored"
    world.crowd(FORGOTTEN)
    explanation = world.explain(engine())
    assert (explanation["state"], explanation["cause"]) == ("miss", "epoch")
    assert "the server of epoch 1 had it, but that of epoch 2 does not" in explanation["text"]


def test_bad_memory_is_explained(world: World) -> None:
    world.store(engine())
    with Pool.open(world.paths) as pool, KVCache(pool, namespace=engine()) as cache:
        offset = IndexClient(cache.client).lookup(cache.keys([KEY])).hits[0].offset
    data = bytearray(Path(world.paths[0]).read_bytes())
    at = data.index(bytes([7]) * SIZE)
    assert at % SIZE == offset % SIZE
    with Path(world.paths[0]).open("r+b") as device:
        device.seek(at + 100)
        device.write(b"flipped")
    for _ in range(2):
        explanation = world.explain(engine())
        assert (explanation["state"], explanation["cause"]) == ("miss", "checksum")
        world.kill()
        world.serve()


def test_a_removed_block_differs_from_one_that_was_never_stored(world: World) -> None:
    world.store(engine(), KEY[::-1])
    assert world.cause(engine()) == "never"
    world.store(engine())
    world.remove(engine())
    assert world.cause(engine()) == "removed"
