# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Namespaces: engines that differ in anything that changes a block never share one."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import numpy as np
import pytest
from vllm_parts import COMMIT, Tensor, cache_config, config, layer_major, spec

from beluga.connectors.identity import config_fields
from beluga.connectors.vllm.cachegroup import CacheGroup, CacheGroups
from beluga.connectors.vllm.identity import check_hashing, identify, namespace
from beluga.connectors.vllm.layout import GroupLayout
from beluga.errors import ConnectorError
from beluga.kvcache import Namespace

LOGGER = logging.getLogger("test")
LONG_S = 60.0


def digest(**changes: Any) -> bytes:
    """Return the digest of :func:`space`."""
    return space(**changes).digest


def space(**changes: Any) -> Namespace:
    """Return the namespace of an engine that differs from the usual one in ``changes``."""
    page = changes.pop("page", (2, 4, 16))
    given = {
        "version": changes.pop("version", "0.32.0"),
        "packing": changes.pop("packing", "FLASH_ATTN"),
        "layers": changes.pop("layers", {"layer.0": "full"}),
        "part": changes.pop("part", "0/1"),
        "pp_rank": changes.pop("pp_rank", 0),
        "salt": changes.pop("salt", ""),
    }
    tensors, _ = layer_major(2, 8, *page)
    layout = GroupLayout(tensors, block_count=8, page_sizes={})
    layout.device = changes.pop("device", layout.device)
    return namespace(config(**changes), layout=layout, **given)


DIFFERENCES: dict[str, dict[str, Any]] = {
    "model configuration": {"hf": {"rope_theta": 1e6}},
    "dtype": {"dtype": "torch.float16"},
    "kv dtype": {"cache_dtype": "fp8"},
    "quantization": {"quantization": "awq"},
    "load format": {"load_format": "dummy"},
    "block size": {"block_size": 8},
    "hash": {"prefix_caching_hash_algo": "sha256_cbor"},
    "layout": {"page": (4, 2, 16)},
    "device of the blocks": {"device": "xpu"},
    "packing": {"packing": "CPU_ATTN amx"},
    "part": {"part": "1/2"},
    "heads": {"part": "heads 0-1/2"},
    "pp rank": {"pp_rank": 1, "pipeline_parallel_size": 2},
    "pp size": {"pipeline_parallel_size": 2},
    "context parallel": {"decode_context_parallel_size": 2},
    "layers": {"layers": {"layer.1": "full"}},
    "kind of layer": {"layers": {"layer.0": "latent"}},
    "engine version": {"version": "0.32.1"},
    "build": {"version": "0.32.0+cpu"},
    "context": {"max_model_len": 8192},
    "salt": {"salt": "tenant"},
}


def test_identical_engines_share_blocks() -> None:
    assert digest() == digest()
    assert digest(hf={"_name_or_path": "/elsewhere"}) == digest()
    paths_and_ranks = {"model": "/elsewhere", "download_dir": "/cache", "tensor_parallel_size": 2}
    assert digest(**paths_and_ranks) == digest()  # the namespace has the rank's part of a block


@pytest.mark.parametrize("name", DIFFERENCES)
def test_engines_that_differ_do_not_share_blocks(name: str) -> None:
    assert digest(**DIFFERENCES[name]) != digest()


def test_all_differences_have_different_identities() -> None:
    digests = {digest(**change) for change in DIFFERENCES.values()}
    assert len(digests) == len(DIFFERENCES)


@pytest.mark.parametrize(
    "name",
    [
        *("model configuration", "dtype", "kv dtype", "quantization", "load format", "block size"),
        *("hash", "pp size", "context parallel"),
    ],
)
def test_the_configuration_alone_distinguishes_engines(name: str) -> None:
    """Some fields of a namespace repeat what is in the configuration, for operators to read."""
    changes = {key: value for key, value in DIFFERENCES[name].items() if not key.endswith("_rank")}
    assert config_fields(config(**changes)) != config_fields(config())


@pytest.mark.parametrize(
    ("field", "changes", "shown"),
    [
        ("engine", {}, "vllm"),
        ("group", {}, 0),
        ("dtype", {"dtype": "torch.float16"}, "torch.float16"),
        ("kv_dtype", {"cache_dtype": "fp8"}, "fp8"),
        ("quantization", {"quantization": "awq"}, "awq"),
        ("block_size", {"block_size": 8}, 8),
        ("hash", {"prefix_caching_hash_algo": "sha256_cbor"}, "sha256_cbor"),
        ("tp", {"part": "heads 1-2/2"}, "heads 1-2/2"),
        ("pp", {"pp_rank": 1, "pipeline_parallel_size": 2}, "1/2"),
        ("cp", {"decode_context_parallel_size": 2}, "2/1"),
    ],
)
def test_the_namespace_shows_operators_which_field_differs(
    field: str, changes: dict[str, Any], shown: Any
) -> None:
    assert space(**changes).fields[field] == shown


def identity(**changes: Any) -> str:
    """Identify the weights of such an engine."""
    declared = changes.pop("identity", "")
    return identify(config(**changes), declared, logger=LOGGER).wait(LONG_S)


def test_dummy_weights_are_identified_by_their_seed() -> None:
    assert identity(load_format="dummy", seed=1) != identity(load_format="dummy", seed=2)
    assert identity(seed=1) == identity(seed=2)


def test_a_commit_of_the_hub_identifies_weights_and_a_branch_does_not() -> None:
    assert identity() != identity(revision="d" * 40) != identity(model="org/other")
    for revision in (None, "main", "c0ffee"):
        with pytest.raises(ConnectorError, match=r"--revision COMMIT.*setting identity"):
            identity(revision=revision)


class Resolved(str):
    """A revision that the hub's client has resolved."""

    resolved = "e" * 40


class ResolvedToModel(str):
    """A revision that the hub's client has resolved to the commit of the model."""

    resolved = COMMIT


def test_the_resolved_commit_is_part_of_the_identity() -> None:
    assert identity(revision=Resolved("main")) == identity(revision="e" * 40)


def test_an_operator_can_set_the_identity_of_unidentified_weights() -> None:
    named = identity(revision=None, identity="release 7")
    assert named == identity(revision=None, model="org/other", identity="release 7")
    assert named != identity(revision=None, identity="release 8")
    with pytest.raises(ConnectorError, match=r"tensorizer.*setting identity"):
        identity(load_format="tensorizer")
    assert identity(load_format="tensorizer", identity="release 7") == named


def test_code_of_another_repository_is_not_identified() -> None:
    code = {"auto_map": {"AutoModel": "org/code--modeling.Model"}}
    with pytest.raises(ConnectorError, match=r"code of another repository .org/code.*identity"):
        identity(hf=code, trust_remote_code=True)
    own = {"auto_map": {"AutoModel": "modeling.Model"}}
    assert identity(hf=own, trust_remote_code=True) == identity(hf=code)


def test_code_of_a_branch_is_not_identified() -> None:
    """Code may come from another commit of the same repository than the weights."""
    made = config(trust_remote_code=True)
    made.model_config.code_revision = "main"
    with pytest.raises(ConnectorError, match=r"code of the revision main.*--code-revision COMMIT"):
        identify(made, "", logger=LOGGER)
    trusting, other = config(trust_remote_code=True), config(trust_remote_code=True)
    trusting.model_config.code_revision, other.model_config.code_revision = "a" * 40, "b" * 40
    assert identify(trusting, "", logger=LOGGER).wait(LONG_S)
    assert config_fields(trusting) != config_fields(other)
    made.model_config.trust_remote_code = False  # then no code is loaded
    assert identify(made, "", logger=LOGGER).wait(LONG_S)


def drafted(**fields: Any) -> str:
    """Identify the weights of an engine with a draft model."""
    made = config()
    draft = {"model": "org/model", "revision": None, "trust_remote_code": False, "seed": 0} | fields
    made.speculative_config = SimpleNamespace(
        draft_model_config=SimpleNamespace(**draft), draft_load_config=None
    )
    return identify(made, "", logger=LOGGER).wait(LONG_S)


def test_a_separate_draft_model_is_part_of_the_identity() -> None:
    plain = identity()
    assert drafted() == plain  # the layers of the model that predict further tokens
    assert drafted(revision=COMMIT) == drafted(revision=ResolvedToModel("main")) == plain
    others = [drafted(revision="d" * 40), drafted(revision=Resolved("main"))]
    others += [drafted(model="org/draft", revision=letter * 40) for letter in "de"]
    assert len({plain, *others}) == 5


@pytest.mark.parametrize("value", [lambda: 0, object(), iter(())])
def test_values_that_cannot_be_compared_are_rejected(value: Any) -> None:
    made = config()
    made.model_config.of_a_new_release = value
    with pytest.raises(ConnectorError, match=r"model_config.of_a_new_release .*setting identity"):
        config_fields(made)
    assert config_fields(made, identity="a") != config_fields(made, identity="b")


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor", "builtin"])
def test_hashes_that_are_not_reproducible_are_rejected(algorithm: str) -> None:
    check_hashing("sha256")
    with pytest.raises(ConnectorError, match="--prefix-caching-hash-algo sha256"):
        check_hashing(algorithm)


def test_one_group_of_full_attention_is_served() -> None:
    group = CacheGroup(config(), cache_config(spec()))
    assert group.block_size == 4
    assert set(group.layers()) == {"layer.0", "layer.1"}
    CacheGroup(config(), cache_config(spec("MLAAttentionSpec")))


@pytest.mark.parametrize(
    "specs",
    [
        (spec(), spec("SlidingWindowSpec")),
        (spec("MambaSpec"),),
        (spec("SlidingWindowSpec"),),
        (spec("ChunkedLocalAttentionSpec"),),
        (),
    ],
)
def test_other_groups_are_refused(specs: tuple[Any, ...]) -> None:
    with pytest.raises(ConnectorError, match="supported"):
        CacheGroup(config(), cache_config(*specs))


@dataclasses.dataclass
class SlidingWindowSpec:
    sliding_window: int = 16
    page_size_bytes: int = 64


@dataclasses.dataclass
class MambaSpec:
    mamba_cache_mode: str = "align"
    real_page_size_bytes: int = 24
    page_size_bytes: int = 64


def hybrid(*specs: Any, scratch: Any = None) -> Any:
    """Make a configuration of groups of one layer each. Other groups do not use ``scratch``."""
    made = cache_config(*specs, *([scratch] if scratch else []), layers=1)
    for number, group in enumerate(made.kv_cache_groups):
        group.layer_names = [f"layer.{number}"]
    made.prefix_cacheable_group_ids = tuple(range(len(specs)))
    return made


def test_one_group_of_full_attention_is_not_a_hybrid() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    groups = CacheGroups(config(), cache_config(spec()))
    assert (groups.hybrid, groups.block_size) == (False, 4)
    assert groups.layers() == CacheGroup(config(), cache_config(spec())).layers()
    assert groups.packing() == CacheGroup(config(), cache_config(spec())).packing()


@pytest.mark.parametrize(
    "specs", [(spec(), SlidingWindowSpec()), (MambaSpec(),), (spec(), MambaSpec(), MambaSpec())]
)
def test_hybrids_are_served_without_their_scratch_groups(specs: tuple[Any, ...]) -> None:
    groups = CacheGroups(config(), hybrid(*specs, scratch=spec("CircularBufferSpec")))
    assert groups.hybrid
    assert [group.number for group in groups.groups] == list(range(len(specs)))
    assert set(groups.layers()) == {f"layer.{number}" for number in range(len(specs))}
    assert len(set(groups.layers().values())) == len(specs)  # each has its group's number


def test_every_property_of_a_window_or_state_changes_the_identity() -> None:
    windows = [
        CacheGroups(config(), hybrid(SlidingWindowSpec(tokens))).layers() for tokens in (16, 32)
    ]
    assert windows[0] != windows[1]


@pytest.mark.parametrize(
    ("changes", "wrong", "reason"),
    [
        ({}, spec("CrossAttentionSpec"), "layer.1 has a CrossAttentionSpec"),
        ({}, MambaSpec(mamba_cache_mode="none"), "--enable-prefix-caching"),
        ({"pipeline_parallel_size": 2}, MambaSpec(), "pipeline_parallel_size is 2"),
        ({"decode_context_parallel_size": 2}, MambaSpec(), "decode_context_parallel_size is 2"),
    ],
)
def test_hybrids_that_cannot_be_shared_are_refused(
    changes: dict[str, int], wrong: Any, reason: str
) -> None:
    with pytest.raises(ConnectorError, match=reason):
        CacheGroups(config(**changes), hybrid(spec(), wrong))


def test_overlapping_groups_have_separate_layouts() -> None:
    memory = np.zeros((8, 32), np.uint16)  # a page of 64 bytes
    tensors = {
        "layer.0": Tensor(memory.reshape(8, 4, 8)),
        "layer.1": Tensor(memory[:, None, None, :12]),  # a state of 24 bytes, and its padding
    }
    groups = CacheGroups(config(), hybrid(spec(), MambaSpec()))
    full, state = groups.layouts(tensors)
    assert (full.block_size, state.block_size) == (64, 24)
    start = memory.ctypes.data
    assert full.fragments([3]).tolist() == [[start + 3 * 64, 64]]
    assert state.fragments([3]).tolist() == [[start + 3 * 64, 24]]


def test_scales_computed_by_one_engine_are_rejected() -> None:
    made = config()
    made.cache_config.calculate_kv_scales = True
    with pytest.raises(ConnectorError, match="calculate_kv_scales"):
        CacheGroup(made, cache_config(spec()))


def layers(**fields: Any) -> dict[str, str]:
    return CacheGroup(config(), cache_config(spec(**fields))).layers()


@pytest.mark.parametrize(
    "difference",
    [
        {"num_kv_heads": 4},
        {"head_size": 16},
        {"head_size_v": 4},
        {"dtype": "torch.float16"},
        {"kv_quant_mode": "fp8"},
        {"tokens_per_state": 2},
        {"sliding_window": 128},
    ],
    ids=str,
)
def test_layers_with_different_contents_have_different_identities(
    difference: dict[str, Any],
) -> None:
    assert layers(**difference) != layers()
    assert layers(page_size_bytes=128) == layers()  # the layout has the page size


def test_a_group_may_declare_the_kind_of_each_layer() -> None:
    both = spec(kv_cache_specs={"a": spec(), "b": spec("MLAAttentionSpec")})
    layers = CacheGroup(config(), cache_config(both)).layers()
    assert (layers["a"].split()[0], layers["b"].split()[0]) == (
        "FullAttentionSpec",
        "MLAAttentionSpec",
    )
    wrong = spec(kv_cache_specs={"a": spec(), "b": spec("MambaSpec")})
    with pytest.raises(ConnectorError, match="b has a MambaSpec"):
        CacheGroup(config(), cache_config(wrong))


def test_blocks_have_the_size_that_hashes_cover() -> None:
    made = cache_config(spec())
    made.hash_block_size = None
    usual = config(decode_context_parallel_size=2)
    assert CacheGroup(usual, made).block_size == 8
    made.hash_block_size = 16
    assert CacheGroup(usual, made).block_size == 16


def test_pages_have_the_size_that_the_engine_reports() -> None:
    tensors, memory = layer_major(2, 8, 4, 16)
    page = memory[0, 0].nbytes
    for fields in ({"page_size_bytes": page}, {"unpadded_page_size_bytes": page}):
        group = CacheGroup(config(), cache_config(spec(**fields)))
        assert group.layout(tensors).block_size == 2 * page
    with pytest.raises(ConnectorError, match="but the engine declares"):
        CacheGroup(config(), cache_config(spec(page_size_bytes=page + 2))).layout(tensors)


def test_the_packing_field_has_kernels_and_cpu_features(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_vllm.torch([]))
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    layer = SimpleNamespace(attn_backend=backend, isa="amx")
    made = config(
        static_forward_context={"layer.0": layer, "layer.1": layer, "draft": SimpleNamespace()}
    )
    assert CacheGroup(made, cache_config(spec())).packing() == "LBHNC ['FLASH_ATTN amx'] "
    made.device_config.device_type = "cpu"
    assert CacheGroup(made, cache_config(spec())).packing().endswith(" AVX512")
    made.compilation_config.static_forward_context.clear()
    assert "['None']" in CacheGroup(made, cache_config(spec())).packing()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_configurations_of_equal_engines_are_equal(vllm_python: str, tiny_model: Path) -> None:
    """Every field that a process or a host sets by itself is in the list of those that do not
    count; if one of a new release was missing there, no two engines would share a block.
    """
    command = [vllm_python, Path(__file__).with_name("config_pairs.py"), tiny_model]
    content = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
    equal = ["the same", "another port", "a prefill engine", "other steps", "two ranks"]
    assert {name: content.pop(name) for name in (*equal, "another name", "files")} == {
        name: [] for name in (*equal, "another name", "files")
    }
    assert all(content.values()), content
