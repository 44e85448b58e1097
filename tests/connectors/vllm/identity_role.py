# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Real vLLM engines that differ in one property, or whose weights change, on one pool.

Run it in .venv-vllm: identity_role.py POOL FOLDER WHAT. All engines use one tiny model. It prints
lines of JSON (``engines``, ``updates``).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import os
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

BLOCK_TOKENS = 32
TOKENS = 4 * BLOCK_TOKENS
HEAD_SIZE = 32
LONG = 1024  # a longest context beyond the one for which LongRoPE has its short factors
SHORT = 256
VOCABULARY, WIDTH = 512, 2 * HEAD_SIZE
WAIT_S = 60.0
COMMITS = {"branch": "a" * 40, "moved": "b" * 40}
ADAPTER_RANK = 8
HALF = struct.pack("<f", 0.5)
UPDATE_SHORT, UPDATE_LONG = 2 * BLOCK_TOKENS + 1, 4 * BLOCK_TOKENS + 1
NOTHING = "nothing"

_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * (HEAD_SIZE // 2),
    "long_factor": [4.0] * (HEAD_SIZE // 2),
    "original_max_position_embeddings": SHORT,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": SHORT,
}


@dataclasses.dataclass(frozen=True)
class Drop:
    """Parts of the identity: fields of a namespace, fields of vLLM's configuration (by class), and
    whether an adapter's bytes are in the names of blocks.
    """

    fields: tuple[str, ...] = ()
    table: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    adapter: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """An engine: how its model and its options differ from the usual ones.

    It computes other bytes than the engine of ``base``, and ``drop`` has all that distinguishes the
    two. Without a drop it computes the same bytes and shares them.
    """

    base: str = "usual"
    model: str = ""  # a change of the model's files
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    adapter: int = 0  # the seed of its weights
    drop: Drop | None = None


def _rope(parameters: Mapping[str, Any], longest: int) -> dict[str, Any]:
    return {"hf_overrides": {"rope_parameters": parameters}, "max_model_len": longest}


def _overridden(name: str) -> Drop:
    return Drop(table={"PretrainedConfig": (name,), "ModelConfig": ("hf_overrides",)})


CASES: dict[str, Case] = {
    "usual": Case(),
    "another folder": Case(model="copy"),
    "limits": Case(
        options={
            "max_num_seqs": 3,
            "kv_cache_memory_bytes": 8 << 20,
            "served_model_name": "other",
            "disable_log_stats": True,
        }
    ),
    "bytes in the middle of the weights": Case(model="middle", drop=Drop(("weights",))),
    "theta": Case(
        options={"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
        drop=_overridden("rope_parameters"),
    ),
    "epsilon": Case(
        options={"hf_overrides": {"rms_norm_eps": 0.1}},
        drop=_overridden("rms_norm_eps"),
    ),
    "configuration in the model's folder": Case(
        model="theta",
        drop=Drop(("weights",), {"PretrainedConfig": ("rope_parameters",)}),
    ),
    "dtype": Case(
        options={"dtype": "bfloat16"},  # for which a CPU with AMX has other kernels
        drop=Drop(("dtype", "layout", "layers", "packing"), {"ModelConfig": ("dtype",)}),
    ),
    "longrope": Case(options=_rope(_LONG_ROPE, SHORT), drop=Drop(("config model_config",))),
    "longrope of a long context": Case(
        base="longrope",
        options=_rope(_LONG_ROPE, LONG),
        drop=Drop(("config model_config", "max_model_len")),
    ),
    "yarn": Case(options=_rope(_YARN, SHORT), drop=Drop(("config model_config",))),
    "a branch of the hub": Case(model="branch"),
    "a branch that has moved": Case(model="moved", drop=Drop(("weights",))),
    "kv dtype": Case(
        options={"kv_cache_dtype": "fp8"},
        drop=Drop(("kv_dtype", "layout", "layers"), {"CacheConfig": ("cache_dtype",)}),
    ),
    "an adapter": Case(base="an adapter", adapter=1),
    "an adapter of this name with other bytes": Case(
        base="an adapter", adapter=2, drop=Drop(adapter=True)
    ),
}

# Fields that no two of these engines differ in, and why none can.
NOT_SHOWN = {
    **dict.fromkeys(("tp", "pp", "cp"), "needs several ranks"),
    **dict.fromkeys(("device", "engine", "engine_version"), "one CPU and one vLLM"),
    **dict.fromkeys(("block_size", "hash"), "other hashes of the same tokens"),
    **dict.fromkeys(("quantization", "environment"), "needs kernels that this CPU may lack"),
    "group": "always 0",
}


def make_model(folder: Path) -> None:
    """Make a Llama with random weights. Only the tests need it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=LONG,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def changed(usual: Path, change: str, folder: Path) -> str:
    """Return the name of a model that differs from the usual one by ``change``."""
    if change in COMMITS:
        return _of_the_hub(usual, change)
    if not change:
        return str(usual)
    made = folder / change
    shutil.copytree(usual, made)
    _change(made, change)
    return str(made)


def _change(folder: Path, change: str) -> None:
    if change == "theta":
        file = folder / "config.json"
        config = json.loads(file.read_text())
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
        file.write_text(json.dumps(config))
    elif change in ("middle", "moved"):
        file = folder / "model.safetensors"
        # a part of the last layer's keys, starting in the middle of the file
        header = int.from_bytes(file.read_bytes()[:8], "little")
        tensors = json.loads(file.read_bytes()[8 : 8 + header])
        start, end = tensors["model.layers.1.self_attn.k_proj.weight"]["data_offsets"]
        with file.open("r+b") as stream:
            stream.seek(8 + header + (start + end) // 2)
            stream.write(HALF * 64 if change == "middle" else HALF * 32)


def _of_the_hub(usual: Path, change: str) -> str:
    """Put a snapshot into the hub's cache, and move the branch to it."""
    repository = Path(os.environ["HF_HUB_CACHE"]) / "models--org--tiny"
    snapshot = repository / "snapshots" / COMMITS[change]
    shutil.copytree(usual, snapshot)
    _change(snapshot, change)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs/main").write_text(COMMITS[change])
    return "org/tiny"


def make_adapter(folder: Path, seed: int) -> Path:
    """Make a LoRA adapter of the keys, in the place of the last one."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    weights = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.k_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(ADAPTER_RANK, WIDTH)
        weights[f"{name}.lora_B.weight"] = torch.randn(WIDTH, ADAPTER_RANK)
    save_file(weights, folder / "adapter_model.safetensors")
    made = {
        "peft_type": "LORA",
        "r": ADAPTER_RANK,
        "lora_alpha": ADAPTER_RANK,
        "target_modules": ["k_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(made))
    return folder


class Watched:
    """The inputs of the running engine's connector, and the names that it makes."""

    def __init__(self) -> None:
        self.layout: Any = None
        self.scheduler: Any = None
        self.spaces: dict[str, Any] = {}  # a namespace without a part of the identity
        self.bytes: list[str] = []  # of each block of the last request
        self.digests: list[bytes] = []  # of these blocks
        self.hashes: list[bytes] = []  # vLLM's

    def watch(self) -> None:
        """Intercept the calls between vLLM, the connector and the function that makes its
        namespace.
        """
        from beluga.connectors.vllm import connector, identity

        kind, namespace = connector.BelugaConnector, identity.namespace
        register, finished = kind.register_kv_caches, kind.request_finished

        def register_kv_caches(own: Any, kv_caches: Any) -> None:
            register(own, kv_caches)
            self.layout = own._worker.saves._source.layouts[0]

        def request_finished(own: Any, request: Any, block_ids: Sequence[int]) -> Any:
            self.scheduler = own
            count = request.num_prompt_tokens // BLOCK_TOKENS
            self.bytes = [self._hash(block) for block in block_ids[:count]]
            self.digests = own._lookups.digests(request, 0, count)
            self.hashes = [bytes(digest) for digest in request.block_hashes[:count]]
            return finished(own, request, block_ids)

        def named(config: Any, **given: Any) -> Any:
            usual = namespace(config, **given)
            self.spaces = {"": usual}
            for name, case in CASES.items():
                if case.drop is not None:
                    with _left_out(case.drop):
                        self.spaces[name] = namespace(config, **given)
            return usual

        kind.register_kv_caches = register_kv_caches  # type: ignore[method-assign]
        kind.request_finished = request_finished  # type: ignore[method-assign]
        connector.namespace = named  # type: ignore[assignment]

    def names(self) -> dict[str, list[str]]:
        """Return the names of the last request's blocks, and those without each case's drop."""
        weights = self.scheduler._lookups.weights
        results = {"": _names(self.spaces[""], weights, Drop(), self.digests)}
        for name, space in self.spaces.items():
            if name:
                drop = CASES[name].drop or Drop()
                digests = self.hashes if drop.adapter else self.digests
                results[name] = _names(space, weights, drop, digests)
        return results

    def _hash(self, block: int) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for address, size in self.layout.fragments([block]).tolist():
            digest.update(ctypes.string_at(address, size))
        return digest.hexdigest()


@contextlib.contextmanager
def _left_out(drop: Drop) -> Iterator[None]:
    """Add fields to the list of those that do not count."""
    from beluga.connectors import identity

    keys = identity.KEYS_IGNORED | set(drop.table.get("PretrainedConfig", ()))
    more = {
        name: f"{identity.IGNORED.get(name, '')} {' '.join(fields)}"
        for name, fields in drop.table.items()
    }
    with mock.patch.object(identity, "KEYS_IGNORED", keys), mock.patch.dict(identity.IGNORED, more):
        yield


def _names(space: Any, weights: str, drop: Drop, digests: Sequence[bytes]) -> list[str]:
    from beluga.connectors.identity import with_weights
    from beluga.kvcache import Namespace

    whole = with_weights(space, weights)
    retained = {name: value for name, value in whole.fields.items() if name not in drop.fields}
    first = Namespace(retained, salt=whole.salt).digest
    return [hashlib.sha256(first + digest).hexdigest()[:16] for digest in digests]


class Engine:
    """One engine."""

    def __init__(self, pool: str, model: str, case: Case) -> None:
        from vllm import LLM

        given: dict[str, Any] = {
            "model": model,
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "block_size": BLOCK_TOKENS,
            "enforce_eager": True,
            "prefix_caching_hash_algo": "sha256_cbor",
            "max_model_len": SHORT,
            "max_num_seqs": 2,
            "kv_cache_memory_bytes": 4 << 20,
            "kv_transfer_config": {
                "kv_connector": "BelugaConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"pool": pool, "timeout_ms": 5000},
            },
        }
        if case.adapter:
            given |= {"enable_lora": True, "max_lora_rank": ADAPTER_RANK}
        self._llm = LLM(**given | case.options)

    def run(
        self, adapter: Path | None, *, salt: str | None = None, tokens: int = TOKENS + 1
    ) -> int:
        """Compute a prompt, and return how many tokens the pool gave. ``salt`` separates it from
        all other prompts.
        """
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        from beluga.connectors.vllm import figures

        prompt: Any = {"prompt_token_ids": [3 + i * 7 % 500 for i in range(tokens)]}
        if salt:
            prompt["cache_salt"] = salt
        lora = LoRARequest("adapter", 1, str(adapter)) if adapter else None
        before = figures()["hit_tokens"]
        sampling = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        self._llm.generate([prompt], sampling, use_tqdm=False, lora_request=lora)
        return int(figures()["hit_tokens"] - before)

    def call(self, method: str, arguments: dict[str, Any]) -> None:
        """Call a method of the workers."""
        self._llm.collective_rpc(method, kwargs=arguments)

    def identified(self, watched: Watched, adapter: Path | None, salt: str) -> None:
        """Compute the prompt until the identities of the weights and of the adapter are
        available.
        """
        deadline = time.monotonic() + WAIT_S
        while True:
            self.run(adapter, salt=f"{salt} {time.monotonic()}")
            lookups = watched.scheduler._lookups
            if lookups.weights and (adapter is None or lookups.adapters._names):
                return
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def settle(self) -> None:
        """Wait until all computed blocks are saved or were present."""
        from beluga.connectors.vllm import figures

        deadline, before = time.monotonic() + WAIT_S, -1.0
        while time.monotonic() < deadline:
            self._llm.llm_engine.step()
            now = sum(figures()[name] for name in ("save_blocks", "save_present_blocks"))
            if now == before:
                return
            before = now
            time.sleep(0.2)

    def forget(self) -> None:
        """Empty vLLM's own cache once all computed blocks are saved."""
        deadline = time.monotonic() + WAIT_S
        while not self._llm.reset_prefix_cache():
            assert time.monotonic() < deadline
            self._llm.llm_engine.step()
            time.sleep(0.02)

    def end(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def engines(pool: str, folder: Path, replies: TextIO) -> None:
    """Start the engine of each case, one after the other. Prints for each a hash of the KV bytes
    that it computes for a prompt, the names of these blocks in the pool, those that they would have
    without each part of the identity, and how many tokens the pool gave.
    """
    usual = folder / "usual"
    make_model(usual)
    watched = Watched()
    watched.watch()
    for name, case in CASES.items():
        engine = Engine(pool, changed(usual, case.model, folder), case)
        adapter = make_adapter(folder / "adapter", case.adapter) if case.adapter else None
        engine.identified(watched, adapter, name)
        computed = watched.bytes
        engine.forget()
        hits = engine.run(adapter)
        report = {
            "case": name,
            "bytes": computed,
            "used": watched.bytes,
            "names": watched.names(),
            "fields": sorted(watched.spaces[""].fields),
            "hits": hits,
        }
        engine.settle()
        engine.end()
        print(json.dumps(report), file=replies, flush=True)


def _steps() -> dict[str, Callable[[], Any]]:
    """Return how each step is left out."""
    from beluga.connectors.vllm import updates

    return {
        NOTHING: contextlib.nullcontext,
        "the calls of the workers": lambda: mock.patch.object(updates, "_changes", _never),
        "the notice": lambda: mock.patch.object(updates.EngineUpdates, "updated"),
        "a generation of its own": lambda: mock.patch.object(updates.WeightsGeneration, "reset"),
    }


def _never(*_: Any) -> bool:
    return False


def updates(pool: str, folder: Path, replies: TextIO) -> None:
    """Update the weights with and without each step that follows an update. Prints, for each step
    that is left out and for none, the blocks of a prompt that differ from those of the new weights;
    and, for none, how many tokens of each prompt the pool gave.
    """
    model = folder / "usual"
    make_model(model)
    other = changed(model, "middle", folder)
    watched = Watched()
    watched.watch()
    engine = Engine(pool, str(model), Case())
    engine.identified(watched, None, "first")
    hits: list[int] = []
    former: dict[str, list[str]] = {}  # hashes of the blocks of the former weights

    def update(weights: Any) -> None:
        engine.call("reload_weights", {"weights_path": str(weights)})

    def computed(salt: str, tokens: int) -> list[str]:
        hits.append(engine.run(None, salt=salt, tokens=tokens))
        engine.settle()
        return list(watched.bytes)

    def wrong(step: str) -> list[int]:
        """Return the blocks that are wrong after an update without this step."""
        update(model)
        engine.forget()
        old = former[step] = computed(step, UPDATE_SHORT)
        with _steps()[step]():
            update(other)
        computed(step, UPDATE_LONG)  # on what vLLM's own cache has
        engine.forget()
        answers = computed(step, UPDATE_LONG)
        assert answers[: len(old)] != old or step != NOTHING
        right = computed(f"{step}, alone", UPDATE_LONG)
        return [index for index, expected in enumerate(right) if answers[index] != expected]

    report: dict[str, Any] = {"wrong": {NOTHING: wrong(NOTHING)}}
    engine.forget()
    computed(NOTHING, UPDATE_LONG)
    update(model)
    engine.forget()
    report["back"] = computed(NOTHING, UPDATE_SHORT) == former[NOTHING]
    report["hits"] = list(hits)
    report["wrong"] |= {step: wrong(step) for step in _steps() if step != NOTHING}
    print(json.dumps(report), file=replies, flush=True)
    engine.end()


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    pool, folder = sys.argv[1], Path(sys.argv[2])
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(folder / "hub"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    from beluga_bench.vllm.engine import _override_kernels

    _override_kernels()
    {"engines": engines, "updates": updates}[sys.argv[3]](pool, folder, replies)


if __name__ == "__main__":
    main()
