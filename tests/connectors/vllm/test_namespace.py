# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Namespaces and names of blocks: engines that differ in anything that changes a block share none,
and neither do requests with media that only a client has named.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import numpy as np
import pytest
from fake_vllm import (
    BLOCK_TOKENS,
    COMMIT,
    Tensor,
    cache_config,
    config,
    layer_major,
    request,
    spec,
)
from real_engines import in_vllm
from scene import LOGGER, LONG_S

from beluga import Namespace
from beluga.connectors.identity import config_fields
from beluga.connectors.vllm import media
from beluga.connectors.vllm.cachegroup import CacheGroup, CacheGroups
from beluga.connectors.vllm.counters import ConnectorCounters
from beluga.connectors.vllm.identity import check_hashing, identify, namespace
from beluga.connectors.vllm.layout import GroupLayout
from beluga.connectors.vllm.lookups import Lookups
from beluga.connectors.vllm.media import MARK, ContentHash, mark_contents, private_from
from beluga.errors import ConnectorError


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


def test_only_identical_engines_share_blocks() -> None:
    usual = digest()
    assert digest() == usual
    assert digest(hf={"_name_or_path": "/elsewhere"}) == usual
    paths_and_ranks = {"model": "/elsewhere", "download_dir": "/cache", "tensor_parallel_size": 2}
    assert digest(**paths_and_ranks) == usual  # the namespace has the rank's part of a block
    digests = {name: digest(**change) for name, change in DIFFERENCES.items()}
    assert [name for name, each in digests.items() if each == usual] == []
    assert len(set(digests.values())) == len(DIFFERENCES)


def test_the_configuration_alone_distinguishes_engines() -> None:
    """Some fields of a namespace repeat what is in the configuration, for operators to read."""
    for name in (
        *("model configuration", "dtype", "kv dtype", "quantization", "load format", "block size"),
        *("hash", "pp size", "context parallel"),
    ):
        assert config_fields(config(**DIFFERENCES[name])) != config_fields(config()), name


def test_the_namespace_shows_operators_which_field_differs() -> None:
    for field, changes, shown in (
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
    ):
        assert space(**changes).fields[field] == shown  # type: ignore[arg-type]


def identity(**changes: Any) -> str:
    """Identify the weights of such an engine."""
    declared = changes.pop("identity", "")
    return identify(config(**changes), declared, logger=LOGGER).wait(LONG_S)


def test_dummy_weights_are_identified_by_their_seed() -> None:
    assert identity(load_format="dummy", seed=1) != identity(load_format="dummy", seed=2)
    assert identity(seed=1) == identity(seed=2)


class Resolved(str):
    """A revision that the hub's client has resolved."""

    resolved = "e" * 40


class ResolvedToModel(str):
    """A revision that the hub's client has resolved to the commit of the model."""

    resolved = COMMIT


def test_a_commit_of_the_hub_identifies_weights_and_a_branch_does_not() -> None:
    assert identity() != identity(revision="d" * 40) != identity(model="org/other")
    for revision in (None, "main", "c0ffee"):
        with pytest.raises(ConnectorError, match=r"--revision COMMIT.*setting identity"):
            identity(revision=revision)
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


def test_one_group_of_full_attention_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_vllm.torch([]))
    group = CacheGroup(config(), cache_config(spec()))
    assert group.block_size == 4
    assert set(group.layers()) == {"layer.0", "layer.1"}
    CacheGroup(config(), cache_config(spec("MLAAttentionSpec")))
    groups = CacheGroups(config(), cache_config(spec()))
    assert (groups.hybrid, groups.block_size) == (False, 4)
    assert (groups.layers(), groups.packing()) == (group.layers(), group.packing())


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


REFUSED: list[tuple[Any, dict[str, int], Any, str]] = [
    (CacheGroup, {}, cache_config(spec(), spec("SlidingWindowSpec")), "supported"),
    (CacheGroup, {}, cache_config(spec("MambaSpec")), "supported"),
    (CacheGroup, {}, cache_config(spec("SlidingWindowSpec")), "supported"),
    (CacheGroup, {}, cache_config(spec("ChunkedLocalAttentionSpec")), "supported"),
    (CacheGroup, {}, cache_config(), "supported"),
    (
        CacheGroup,
        {},
        cache_config(spec(kv_cache_specs={"a": spec(), "b": spec("MambaSpec")})),
        "b has a MambaSpec",
    ),
    (CacheGroups, {}, hybrid(spec(), spec("CrossAttentionSpec")), "layer.1 has a CrossAttention"),
    (CacheGroups, {}, hybrid(spec(), MambaSpec("none")), "--enable-prefix-caching"),
    *(
        (CacheGroups, {field: 2}, hybrid(spec(), MambaSpec()), f"{field} is 2")
        for field in ("pipeline_parallel_size", "decode_context_parallel_size")
    ),
]


@pytest.mark.parametrize(("kind", "changes", "groups", "message"), REFUSED)
def test_groups_that_cannot_be_shared_are_refused(
    kind: Any, changes: dict[str, int], groups: Any, message: str
) -> None:
    with pytest.raises(ConnectorError, match=message):
        kind(config(**changes), groups)


def test_scales_and_hashes_of_one_engine_are_refused() -> None:
    made = config()
    made.cache_config.calculate_kv_scales = True
    with pytest.raises(ConnectorError, match="calculate_kv_scales"):
        CacheGroup(made, cache_config(spec()))
    check_hashing("sha256")
    for algorithm in ("xxhash", "xxhash_cbor", "builtin"):
        with pytest.raises(ConnectorError, match="--prefix-caching-hash-algo sha256"):
            check_hashing(algorithm)


@pytest.mark.parametrize(
    "specs", [(spec(), SlidingWindowSpec()), (MambaSpec(),), (spec(), MambaSpec(), MambaSpec())]
)
def test_hybrids_are_served_without_their_scratch_groups(specs: tuple[Any, ...]) -> None:
    groups = CacheGroups(config(), hybrid(*specs, scratch=spec("CircularBufferSpec")))
    assert groups.hybrid
    assert [group.number for group in groups.groups] == list(range(len(specs)))
    assert set(groups.layers()) == {f"layer.{number}" for number in range(len(specs))}
    assert len(set(groups.layers().values())) == len(specs)  # each has its group's number


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


def layers(**fields: Any) -> dict[str, str]:
    return CacheGroup(config(), cache_config(spec(**fields))).layers()


def test_layers_with_different_contents_have_different_identities() -> None:
    usual = layers()
    for difference in (
        {"num_kv_heads": 4},
        {"head_size": 16},
        {"head_size_v": 4},
        {"dtype": "torch.float16"},
        {"kv_quant_mode": "fp8"},
        {"tokens_per_state": 2},
        {"sliding_window": 128},
    ):
        assert layers(**difference) != usual, difference
    assert layers(page_size_bytes=128) == usual  # the layout has the page size
    windows = [
        CacheGroups(config(), hybrid(SlidingWindowSpec(tokens))).layers() for tokens in (16, 32)
    ]
    assert windows[0] != windows[1]


def test_a_group_may_declare_the_kind_of_each_layer() -> None:
    both = spec(kv_cache_specs={"a": spec(), "b": spec("MLAAttentionSpec")})
    layers = CacheGroup(config(), cache_config(both)).layers()
    kinds = [layers[name].split()[0] for name in "ab"]
    assert kinds == ["FullAttentionSpec", "MLAAttentionSpec"]


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
    content = in_vllm(vllm_python, "config_pairs", str(tiny_model))
    equal = ["the same", "another port", "a prefill engine", "other steps", "two ranks"]
    assert {name: content.pop(name) for name in (*equal, "another name", "files")} == {
        name: [] for name in (*equal, "another name", "files")
    }
    assert all(content.values()), content


MEDIA_TOKENS = list(range(6 * BLOCK_TOKENS))
CONTENT, NAME = MARK + 64 * "0", 64 * "0"  # a client's name may look like a hash


# ---- Media: blocks whose hash contains a client's name for an image are private to a process.


class Inputs:
    """vLLM's ProcessorInputs: items, and the names that clients gave to some."""

    def __init__(self, items: list[Any], uuids: list[str | None] | None) -> None:
        items_of_image = SimpleNamespace(get_all_items_for_hash=lambda: items)
        self.mm_data_items = {"image": items_of_image}
        self.mm_uuid_items = None if uuids is None else {"image": uuids}

    def get_mm_hashes(self, model_id: str) -> dict[str, list[str]]:
        items = self.mm_data_items["image"].get_all_items_for_hash()
        names = (self.mm_uuid_items or {}).get("image") or [None] * len(items)
        return {
            "image": [name or f"{model_id}{item}" for item, name in zip(items, names, strict=True)]
        }


class Processor:
    """vLLM's InputProcessor."""

    def _get_mm_identifier(self, mm_hash: str, lora: str | None) -> str:
        return mm_hash if lora is None else f"{lora}:{mm_hash}"


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the marking of contents in these two classes."""
    for kind, name in ((Inputs, "get_mm_hashes"), (Processor, "_get_mm_identifier")):
        monkeypatch.setattr(kind, name, getattr(kind, name))
    owners = {media._INPUTS: Inputs, media._PROCESSOR: Processor}
    monkeypatch.setattr(media, "_owner_of", lambda where: owners[where])
    mark_contents()
    mark_contents()  # a second call does nothing


def identifiers(
    items: list[Any], uuids: list[str | None] | None, lora: str | None = None
) -> list[str]:
    hashes = Inputs(items, uuids).get_mm_hashes("m")["image"]
    return [Processor()._get_mm_identifier(digest, lora) for digest in hashes]


def test_content_hashes_are_marked_and_client_names_are_not(marked: None) -> None:
    assert identifiers(["a", "b"], [None, "cat"]) == [f"{MARK}ma", "cat"]
    assert identifiers(["a"], None) == [f"{MARK}ma"]
    assert identifiers(["a"], [None], lora="x") == [f"x:{MARK}ma"]


@pytest.mark.parametrize("name", [MARK + "ma", f"x:{MARK}ma", MARK + MARK + "ma"])
def test_clients_cannot_forge_the_mark(marked: None, name: str) -> None:
    for lora in (None, "x"):
        (identifier,) = identifiers(["a"], [name], lora)
        assert MARK not in identifier
        made = Processor()._get_mm_identifier(name, lora)  # with the types of a client's tokens
        assert MARK not in made


def test_a_marked_hash_is_plain_text_for_other_code() -> None:
    assert ContentHash("a") == "a" and hash(ContentHash("a")) == hash("a")


def test_a_vllm_without_these_functions_shares_no_media(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "_owner_of", lambda where: None)
    mark_contents()
    made = request("r", MEDIA_TOKENS, images=[(NAME, 5)])
    assert private_from(made, BLOCK_TOKENS) == 1


def lookups() -> Lookups:
    """Make the lookups of an engine process."""
    connection: Any = SimpleNamespace()
    made = Lookups(
        connection, ConnectorCounters(), block_size=BLOCK_TOKENS, logger=logging.getLogger("t")
    )
    made.ranks = (Namespace.of("rank"),)
    return made


@pytest.mark.parametrize(
    ("images", "shared"),
    [
        ([], 6),
        ([(CONTENT, 9)], 6),
        ([(NAME, 9)], 2),
        ([(CONTENT, 2), (NAME, 12)], 3),
        ([(NAME, 0), (CONTENT, 12)], 0),
        ([("", 4)], 1),
        ([(f"x:{CONTENT}", 9)], 6),  # with an adapter's name before it
        ([(f"{MARK}x:cat", 9)], 2),  # an adapter whose name has the mark
    ],
)
def test_blocks_after_the_first_client_name_are_private_to_the_process(
    images: list[tuple[str, int]], shared: int
) -> None:
    own, other = lookups(), lookups()
    made = request("r", MEDIA_TOKENS, images=images)
    first, second = own.digests(made, 0, 6), other.digests(made, 0, 6)
    assert first[:shared] == second[:shared]
    assert not set(first[shared:]) & set(second[shared:])
    assert first == own.digests(request("s", MEDIA_TOKENS, images=images), 0, 6)
    for start in range(6):  # each part like the whole
        assert own.digests(made, start, 6) == first[start:]


def test_a_private_block_has_another_hash_after_a_reset() -> None:
    own, made = lookups(), request("r", MEDIA_TOKENS, images=[(NAME, 0)])
    before = own.digests(made, 0, 6)
    own.reset()
    assert not set(before) & set(own.digests(made, 0, 6))
