# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Fakes of the parts of vLLM and torch that our connector imports, and of the data that vLLM passes
to it.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import logging
import re
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from fakes import modules

BLOCK_TOKENS = UNIT = 4
V1 = "distributed.kv_transfer.kv_connector.v1"
_WORD = re.compile("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # the border of two words


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class Metadata:
    """The data that the two sides exchange."""


class Connector:
    """A fake of KVConnectorBase_V1."""

    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any) -> None:
        self._vllm_config, self._role, self._kv_cache_config = vllm_config, role, kv_cache_config
        self._kv_cache_manager: Any = None

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._bound = metadata

    def _get_connector_metadata(self) -> Any:
        return self._bound


@dataclasses.dataclass
class Stats:
    data: dict[str, Any] = dataclasses.field(default_factory=dict)


class PromMetrics:
    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


@dataclasses.dataclass
class BlockStored:
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[Any] | None
    group_idx: int
    kv_cache_spec_kind: str | None
    kv_cache_spec_sliding_window: int | None
    locality: str | None = None
    ownership: str | None = None


def tagged_keys(request: Any, start: int, end: int, first: int) -> tuple[Any, int]:
    """Return what a block's hash covers in addition to tokens, and the number of the next image."""
    images = [
        (number, feature.identifier, feature.mm_position.offset)
        for number, feature in enumerate(request.mm_features)
    ][first:]
    shown = [(number, name, at) for number, name, at in images if start <= at < end]
    keys: list[tuple[Any, ...]] = []
    if request.lora_request:
        keys.append(("lora", request.lora_request.lora_name, request.lora_request.lora_path))
    keys += [("mm", name, at - start) for _, name, at in shown]
    if start == 0 and request.cache_salt:
        keys.append(("cache_salt", request.cache_salt))
    return tuple(keys) or None, shown[-1][0] + 1 if shown else first


def event_keys(keys: list[Any]) -> list[Any] | None:
    """Return extra keys in the form of events."""
    return [
        None if block is None else tuple(key[1:] if key[0] == "mm" else key[1] for key in block)
        for block in keys
    ] or None


class KVCacheManager:
    """vLLM's manager of its own cache, with the parts of its pool of blocks that show whether it is
    empty.
    """

    def __init__(self) -> None:
        self.block_ids: dict[str, list[int]] = {}
        self.block_pool = types.SimpleNamespace(
            num_gpu_blocks=1, get_num_free_blocks=lambda: 0, cached_block_hashes_by_block={}
        )

    def get_block_ids(self, request_id: str) -> tuple[list[int]]:
        return (self.block_ids[request_id],)

    def reset_prefix_cache(self) -> bool:
        self.block_pool.cached_block_hashes_by_block.clear()
        return True


class Executor:
    """vLLM's executor: it calls methods of all workers."""


class UniProcExecutor(Executor):
    def __init__(self, called: list[Any]) -> None:
        self.called = called

    def collective_rpc(self, method: Any, *arguments: Any, **named: Any) -> list[Any]:
        self.called.append(method)
        return [None]


class Failing:
    """A list that cannot be added to."""

    def append(self, _: Any) -> None:
        raise RuntimeError("half of the weights are new")


class EngineCore:
    """vLLM's engine, in the scheduler's process."""

    def __init__(self, executor: Any) -> None:
        self.model_executor = executor

    def collective_rpc(self, method: Any, *arguments: Any, **named: Any) -> list[Any]:
        return self.model_executor.collective_rpc(method, *arguments, **named)

    def set_weight_version(self, weight_version: str) -> None:
        self.version = weight_version


class Factory:
    """A fake of KVConnectorFactory."""

    def __init__(self) -> None:
        self._registry: dict[str, tuple[str, str]] = {}

    def register_connector(self, name: str, module: str, class_name: str) -> None:
        assert name not in self._registry, "vLLM refuses a second one"
        self._registry[name] = module, class_name


class LookupResult(enum.Enum):
    MISS = 1
    HIT = 2
    RETRY = 4


class Medium(enum.Enum):
    CPU = "CPU"


@dataclasses.dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class AsyncLookupManager:
    """A fake whose lookups are made when a step ends, in the caller's thread."""

    def __init__(self, tier_type: str) -> None:
        self._answers: dict[bytes, bool | None] = {}

    def lookup(self, key: bytes, context: Any) -> bool | None:
        return self._answers.setdefault(key, None)

    def flush(self) -> None:
        keys = [key for key, answer in self._answers.items() if answer is None]
        answers: Any = self.batch_lookup(keys, None) if keys else []  # type: ignore[attr-defined]
        self._answers.update(zip(keys, answers, strict=True))

    def mark_miss(self, keys: list[bytes]) -> None:
        self._answers.update(dict.fromkeys(keys, False))

    def cleanup(self, request_id: str) -> None:
        self._answers.clear()

    def shutdown(self) -> None:
        self._answers.clear()


class SecondaryTierManager:
    """A fake of vLLM's base class of tiers."""

    def __init__(self, spec: Any, view: memoryview, tier_type: str, detector: Any) -> None:
        assert view.strides is not None
        self.block_size_bytes, self.tier_type = view.strides[0], tier_type


# Variables that vLLM reads.
VARIABLES = ("VLLM_PORT", "VLLM_MARLIN_INPUT_DTYPE")


def vllm(*, tp_rank: int = 0, pp_rank: int = 0) -> dict[str, types.ModuleType]:
    """Make the package vllm, in a process of these ranks. ``group`` is its connector."""

    def rank(number: int) -> Any:
        return lambda: types.SimpleNamespace(rank_in_group=number)

    group = types.SimpleNamespace()
    return modules(
        "vllm",
        {
            "": {"__version__": "0.32.0"},
            "envs": {"environment_variables": dict.fromkeys(VARIABLES)},
            "logger": {"init_logger": logging.getLogger},
            f"{V1}.base": {
                "KVConnectorBase_V1": Connector,
                "KVConnectorHandshakeMetadata": Metadata,
                "KVConnectorMetadata": Metadata,
                "KVConnectorRole": Role,
                "KVConnectorTransferResults": types.SimpleNamespace,
                "SupportsHMA": type("SupportsHMA", (), {}),
                "KVConnectorWorkerMetadata": Metadata,
            },
            f"{V1}.metrics": {"KVConnectorPromMetrics": PromMetrics, "KVConnectorStats": Stats},
            "distributed.kv_transfer.kv_connector.factory": {"KVConnectorFactory": Factory()},
            "distributed.kv_transfer": {"get_kv_transfer_group": lambda: group, "group": group},
            "distributed.parallel_state": {
                "get_pp_group": rank(pp_rank),
                "get_tp_group": rank(tp_rank),
            },
            "distributed.kv_events": {"BlockStored": BlockStored},
            "platforms": {
                "current_platform": types.SimpleNamespace(
                    device_type="cuda", get_device_name=lambda: "H200"
                )
            },
            "v1.kv_offload.base": {"LookupResult": LookupResult, "Medium": Medium},
            "v1.kv_offload.tiering.async_lookup": {"AsyncLookupManager": AsyncLookupManager},
            "v1.kv_offload.tiering.base": {
                "JobResult": JobResult,
                "RequestOffloadingContext": types.SimpleNamespace,
                "SecondaryTierManager": SecondaryTierManager,
                "TransferJob": types.SimpleNamespace,
            },
            "v1.core.kv_cache_manager": {"KVCacheManager": KVCacheManager},
            "v1.engine.core": {"EngineCore": EngineCore},
            "v1.kv_cache_interface": {
                "get_kv_cache_spec_kind": lambda spec: types.SimpleNamespace(
                    value=_WORD.sub("_", type(spec).__name__.removesuffix("Spec")).lower()
                ),
                "get_kv_cache_spec_sliding_window": lambda spec: getattr(
                    spec, "sliding_window", None
                ),
            },
            "v1.executor.abstract": {"Executor": Executor},
            "v1.core.kv_cache_utils": {
                "maybe_convert_block_hash": lambda digest: digest[:8],
                "generate_block_hash_extra_keys": tagged_keys,
                "to_event_extra_keys": event_keys,
            },
        },
    )


def torch(requested: list[str]) -> types.ModuleType:
    """Make the parts of torch for a CPU. ``requested`` records the request for tiles."""
    module = types.ModuleType("torch")
    vars(module)["cpu"] = types.SimpleNamespace(_init_amx=lambda: requested.append("amx"))
    vars(module)["backends"] = types.SimpleNamespace(
        cpu=types.SimpleNamespace(get_cpu_capability=lambda: "AVX512")
    )
    return module


OURS = ("connector", "stats", "tier")


def installed(monkeypatch: Any, requested: list[str] | None = None, **ranks: int) -> None:
    """Make modules import these fakes for one test. Our modules are imported again."""
    for name, module in vllm(**ranks).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "torch", torch([] if requested is None else requested))
    for name in OURS:
        monkeypatch.delitem(sys.modules, f"beluga.connectors.vllm.{name}", raising=False)
        package = sys.modules.get("beluga.connectors.vllm")
        if package is not None and name in vars(package):
            monkeypatch.delattr(package, name)


STEP = 2 * UNIT
NULL = 0


@dataclasses.dataclass(frozen=True)
class Spec:
    name: str
    block_size: int


@dataclasses.dataclass(frozen=True)
class StateSpec(Spec):
    mamba_cache_mode: str = "align"


SPECS = (Spec("full", UNIT), Spec("window", UNIT), StateSpec("state", STEP))


@dataclasses.dataclass
class KVCacheConfig:
    """vLLM's configuration of these groups, with scratch memory before the state's group."""

    num_blocks: int = 64
    prefix_cacheable_group_ids: tuple[int, ...] = (0, 1, 3)


class Store:
    """vLLM's view of which blocks exist."""

    def __init__(self, unit: int, exists: set[tuple[int, bytes]]) -> None:
        assert unit == UNIT
        self.exists = exists


class Rules:
    def __init__(self) -> None:
        self.kv_cache_groups = [SimpleNamespace(kv_cache_spec=spec) for spec in SPECS]

    @classmethod
    def from_kv_cache_config(cls, _config: Any, _vllm: Any, step: int, unit: int) -> Rules:
        assert (step, unit) == (STEP, UNIT)
        return cls()

    eagle_group_ids: frozenset[int] = frozenset()
    enable_partial_hash_hits = False

    def align_lookup_length(self, tokens: int) -> int:
        return tokens // STEP * STEP

    def lookup_mask(self, tokens: int) -> tuple[None, list[bool], None]:
        assert tokens % STEP == 0
        return None, [True] * (tokens // UNIT), None

    def load_mask(self, _: Any, tokens: int) -> tuple[list[bool], ...]:
        blocks, states = tokens // UNIT, tokens // STEP
        return (
            [True] * blocks,
            [index >= blocks - 2 for index in range(blocks)],
            [index == states - 1 for index in range(states)],
        )

    def store_mask(self, tokens: int, start: int, prompt: int) -> tuple[list[bool] | None, ...]:
        last = (prompt - 1) // STEP * STEP // UNIT
        window = [last - 2 <= index < last for index in range(start // UNIT, tokens // UNIT)]
        return None, window, [False] * (tokens // STEP - start // STEP)

    def block_hashes_for_spec(self, hashes: list[bytes], spec: Spec) -> list[bytes]:
        each = spec.block_size // UNIT
        return hashes[each - 1 :: each]

    def find_longest_cache_hit(self, hashes: list[bytes], limit: int, store: Store) -> Any:
        for tokens in range(limit, 0, -STEP):
            masks = self.load_mask(hashes, tokens)
            names = {
                (group, self.block_hashes_for_spec(hashes, SPECS[group])[index])
                for group, mask in enumerate(masks)
                for index, wanted in enumerate(mask)
                if wanted
            }
            if names <= store.exists:
                return masks, tokens
        return (), 0


class FineRules(Rules):
    """The rules of a model without a window that resumes inside blocks, after any unit: full
    attention and a state, with blocks of STEP tokens.
    """

    enable_partial_hash_hits = True

    def __init__(self) -> None:
        specs = Spec("full", STEP), StateSpec("state", STEP)
        self.kv_cache_groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]

    def align_lookup_length(self, tokens: int) -> int:
        return tokens // UNIT * UNIT

    def lookup_mask(self, tokens: int) -> Any:
        return None, None

    def load_mask(self, _: Any, tokens: int) -> Any:
        blocks = -(-tokens // STEP)
        return [True] * blocks, [index == blocks - 1 for index in range(blocks)]

    def store_mask(self, tokens: int, start: int, prompt: int) -> Any:
        return None, [False] * (tokens // STEP - start // STEP)

    def find_longest_cache_hit(self, hashes: list[bytes], limit: int, store: Store) -> Any:
        for tokens in range(limit, 0, -UNIT):
            ends = [*range(STEP, tokens, STEP), tokens]
            names = {(0, hashes[end // UNIT - 1]) for end in ends}
            if names | {(1, hashes[tokens // UNIT - 1])} <= store.exists:
                return (), tokens
        return (), 0


class BlockPool:
    """vLLM's blocks, with the number of their users."""

    def __init__(self, count: int) -> None:
        self.blocks = list(range(count))
        self.users = [0] * count

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            self.users[block] += 1

    def free_blocks(self, blocks: list[int]) -> None:
        for block in blocks:
            assert self.users[block] > 0
            self.users[block] -= 1

    def pinned(self) -> set[int]:
        return {block for block, users in enumerate(self.users) if users}


def rule_modules() -> dict[str, dict[str, Any]]:
    """Return the contents of vLLM's modules that the rules come from."""
    return {
        "distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator": {
            "ExternalCachedBlockPool": Store,
            "MooncakeStoreCoordinator": Rules,
        },
        "v1.core.kv_cache_coordinator": {
            "replay_boundaries": lambda tokens, _, *, use_eagle: (tokens - 1 - use_eagle * STEP,)
        },
        "v1.core.kv_cache_utils": {
            "resolve_kv_cache_block_sizes": lambda _config, _vllm: (STEP, UNIT)
        },
    }


# ---- The data that vLLM passes to a connector, as far as the connector uses it.

COMMIT = "c0ffee" + 34 * "0"  # a commit of the hub


class Tensor:
    """A view of numpy memory with torch's names."""

    def __init__(self, array: np.ndarray, dtype: str = "torch.bfloat16") -> None:
        self.array, self.dtype = array, dtype
        self.shape = array.shape
        self.device = SimpleNamespace(type="cpu")

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def element_size(self) -> int:
        return self.array.itemsize

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def untyped_storage(self) -> Tensor:
        return self


def layer_major(layers: int, blocks: int, *page: int) -> tuple[dict[str, Tensor], np.ndarray]:
    """Return one tensor per layer over memory with the axes (layer, block, *page), and that
    memory.
    """
    memory = np.zeros((layers, blocks, *page), dtype=np.uint16)
    return {f"layer.{i}": Tensor(memory[i]) for i in range(layers)}, memory


def request(
    name: str,
    tokens: list[int],
    *,
    salt: str = "",
    lora: Any = None,
    images: Sequence[tuple[str, int]] = (),
) -> Any:
    """Make a request whose blocks are hashed in a chain as in vLLM. Images are identifiers, each
    with the token where it begins.
    """
    made = SimpleNamespace(
        request_id=name,
        all_token_ids=list(tokens),
        block_hashes=[],
        num_computed_tokens=0,
        num_in_flight_tokens=0,
        num_nans_in_logits=0,
        lora_request=lora,
        cache_salt=salt or None,
        mm_features=[image(*description) for description in images],
    )
    extend(made, [])
    return made


def no_extra_keys(_: Any, start: int, stop: int) -> list[None]:
    """Return the extra keys of blocks that have none."""
    return [None] * (stop - start)


def extend(made: Any, tokens: list[int]) -> None:
    """Add tokens, and the hashes of the blocks that they complete."""
    made.all_token_ids += tokens
    made.num_tokens = len(made.all_token_ids)
    while len(made.block_hashes) < made.num_tokens // BLOCK_TOKENS:
        at = len(made.block_hashes) * BLOCK_TOKENS
        parent = made.block_hashes[-1] if made.block_hashes else (made.cache_salt or "").encode()
        images = [(feature.identifier, feature.mm_position.offset) for feature in made.mm_features]
        shown = [(name, token - at) for name, token in images if token >= at]
        block = repr((made.all_token_ids[at : at + BLOCK_TOKENS], shown)).encode()
        made.block_hashes.append(hashlib.sha256(parent + block).digest())


def spec(kind: str = "FullAttentionSpec", **fields: Any) -> Any:
    """Make a KV cache spec of that class name."""
    given = {"num_kv_heads": 2, "head_size": 8, "dtype": "torch.bfloat16", "page_size_bytes": 64}
    return type(kind, (), given | fields)()


def cache_config(*specs: Any, num_blocks: int = 8, layers: int = 2) -> Any:
    """Make a ``KVCacheConfig`` with a group for each spec."""
    return SimpleNamespace(
        num_blocks=num_blocks,
        hash_block_size=BLOCK_TOKENS,
        kv_cache_layout="LBHNC",
        kv_cache_groups=[
            SimpleNamespace(layer_names=[f"layer.{i}" for i in range(layers)], kv_cache_spec=spec)
            for spec in specs
        ],
    )


class PretrainedConfig:
    """A model's configuration as transformers keeps it."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def to_dict(self) -> dict[str, Any]:
        return dict(self._fields)


def image(identifier: str, offset: int) -> Any:
    """Make an image of a request: the name that vLLM gives it, and the token where it begins."""
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset))


def config(**changes: Any) -> Any:
    """Make a ``VllmConfig``. The keys of ``changes`` are the last parts of settings' names."""
    hf = {"hidden_size": 64, "_name_or_path": "/somewhere", **changes.pop("hf", {})}
    sections: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": "org/model",
            "revision": COMMIT,
            "quantization": None,
            "dtype": "torch.bfloat16",
            "seed": 0,
            "max_model_len": 4096,
            "trust_remote_code": False,
        },
        "load_config": {"load_format": "auto", "download_dir": "/nowhere"},
        "cache_config": {
            "cache_dtype": "auto",
            "block_size": BLOCK_TOKENS,
            "prefix_caching_hash_algo": "sha256",
        },
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
        },
        "device_config": {"device_type": "cuda"},
        "compilation_config": {"static_forward_context": {}},
    }
    known = {name for fields in sections.values() for name in fields}
    assert changes.keys() <= known, changes.keys() - known
    made = {
        part: _part(part)(**{name: changes.get(name, value) for name, value in fields.items()})
        for part, fields in sections.items()
    }
    made["model_config"].hf_config = PretrainedConfig(hf)
    return _part("vllm_config")(**made)


def _part(name: str) -> Any:
    """Return a class with the name that vLLM's has."""
    return type("".join(map(str.capitalize, name.split("_"))), (SimpleNamespace,), {})


def adapter(folder: Path, name: str, content: bytes = b"1", **fields: Any) -> Any:
    """Make a LoRA adapter with these bytes."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(content)
    return SimpleNamespace(
        **{"lora_name": name, "lora_path": str(folder), "lora_int_id": 1} | fields
    )
