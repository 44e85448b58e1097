# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Namespaces: engines that differ in anything that changes a block never share one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest
from vllm_parts import cache_config, config, layer_major, spec

from beluga.connectors.naming import SAMPLE_SIZE, major, model_identity
from beluga.connectors.vllm.cachegroup import CacheGroup
from beluga.connectors.vllm.identity import adapter_identity, check_hashing, namespace
from beluga.connectors.vllm.layout import BlockLayout
from beluga.errors import ConnectorError


def digest(**changes: Any) -> bytes:
    """Return the digest of an engine that differs from the usual one in ``changes``."""
    page = changes.pop("page", (2, 4, 16))
    given = {
        "version": changes.pop("version", "0.32.0"),
        "packing": changes.pop("packing", "FLASH_ATTN"),
        "layers": changes.pop("layers", {"layer.0": "full"}),
        "tp_rank": changes.pop("tp_rank", 0),
        "pp_rank": changes.pop("pp_rank", 0),
        "salt": changes.pop("salt", ""),
    }
    tensors, _ = layer_major(2, 8, *page)
    layout = BlockLayout(tensors, block_count=8, page_sizes={})
    return namespace(config(**changes), layout=layout, **given).digest


DIFFERENCES: dict[str, dict[str, Any]] = {
    "model": {"model": "org/other"},
    "revision": {"revision": "v2"},
    "model configuration": {"hf": {"rope_theta": 1e6}},
    "dtype": {"dtype": "torch.float16"},
    "kv dtype": {"cache_dtype": "fp8"},
    "quantization": {"quantization": "awq"},
    "made-up weights": {"load_format": "dummy"},
    "block size": {"block_size": 8},
    "hash": {"prefix_caching_hash_algo": "sha256_cbor"},
    "layout": {"page": (4, 2, 16)},
    "packing": {"packing": "CPU_ATTN amx"},
    "tp rank": {"tp_rank": 1, "tensor_parallel_size": 2},
    "tp size": {"tensor_parallel_size": 2},
    "pp rank": {"pp_rank": 1, "pipeline_parallel_size": 2},
    "pp size": {"pipeline_parallel_size": 2},
    "context parallel": {"decode_context_parallel_size": 2},
    "layers": {"layers": {"layer.1": "full"}},
    "kind of layer": {"layers": {"layer.0": "latent"}},
    "engine version": {"version": "0.33.0"},
    "salt": {"salt": "tenant"},
}


def test_engines_that_are_alike_share() -> None:
    assert digest() == digest()
    assert digest(hf={"_name_or_path": "/elsewhere"}) == digest()
    assert digest(version="0.32.1+cpu") == digest()


@pytest.mark.parametrize("name", DIFFERENCES)
def test_engines_that_differ_do_not(name: str) -> None:
    assert digest(**DIFFERENCES[name]) != digest()


def test_all_those_differences_differ_from_each_other() -> None:
    found = {digest(**change) for change in DIFFERENCES.values()}
    assert len(found) == len(DIFFERENCES)


def test_made_up_weights_are_those_of_a_seed() -> None:
    assert digest(load_format="dummy", seed=1) != digest(load_format="dummy", seed=2)
    assert digest(seed=1) == digest(seed=2)


def weights(folder: Path, content: bytes) -> str:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(content)
    return model_identity(str(folder), "main")


def test_a_local_model_is_its_weights_not_its_path(tmp_path: Path) -> None:
    size = 40 * SAMPLE_SIZE
    one = weights(tmp_path / "a", bytes(size))
    assert weights(tmp_path / "b", bytes(size)) == one
    assert weights(tmp_path / "c", bytes(size + 1)) != one
    assert weights(tmp_path / "d", bytes(size - 1) + b"x") != one
    assert weights(tmp_path / "e", b"x" + bytes(size - 1)) != one


def test_an_adapter_of_the_same_name_elsewhere_is_another(tmp_path: Path) -> None:
    weights(tmp_path / "a", b"1" * 100)
    weights(tmp_path / "b", b"2" * 100)
    first, second = (
        adapter_identity(SimpleNamespace(lora_name="x", lora_path=str(tmp_path / name)))
        for name in "ab"
    )
    assert first != second
    assert adapter_identity(None) == b""


def test_versions() -> None:
    assert (major("0.32.1+cpu"), major("1.4.2"), major("0.33.0")) == ("0.32", "1", "0.33")


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor", "builtin"])
def test_hashes_that_no_other_process_makes_are_refused(algorithm: str) -> None:
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
    with pytest.raises(ConnectorError, match="beluga serves"):
        CacheGroup(config(), cache_config(*specs))


def test_scales_of_one_engine_alone_are_refused() -> None:
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
def test_layers_that_differ_in_what_they_hold_are_told_apart(difference: dict[str, Any]) -> None:
    assert layers(**difference) != layers()
    assert layers(page_size_bytes=128) == layers()  # the layout has the page size


def test_a_group_may_say_of_each_layer_what_it_is() -> None:
    both = spec(kv_cache_specs={"a": spec(), "b": spec("MLAAttentionSpec")})
    found = CacheGroup(config(), cache_config(both)).layers()
    assert (found["a"].split()[0], found["b"].split()[0]) == (
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


def test_pages_are_as_large_as_the_engine_says() -> None:
    tensors, memory = layer_major(2, 8, 4, 16)
    page = memory[0, 0].nbytes
    for fields in ({"page_size_bytes": page}, {"unpadded_page_size_bytes": page}):
        group = CacheGroup(config(), cache_config(spec(**fields)))
        assert group.layout(tensors).block_size == 2 * page
    with pytest.raises(ConnectorError, match="where the engine says"):
        CacheGroup(config(), cache_config(spec(page_size_bytes=page + 2))).layout(tensors)


def test_packing_names_the_kernels_and_on_a_cpu_its_instructions(
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


def test_all_kinds_of_weight_files_count_and_no_others(tmp_path: Path) -> None:
    found = {model_identity(str(tmp_path), "")}
    for name in ("a.safetensors", "b.bin", "c.pt", "d.pth", "e.gguf"):
        (tmp_path / name).write_bytes(b"x")
        found.add(model_identity(str(tmp_path), ""))
    assert len(found) == 6
    (tmp_path / "README.md").write_bytes(b"x")
    assert model_identity(str(tmp_path), "") in found
    (tmp_path / "b.bin").rename(tmp_path / "f.bin")
    assert model_identity(str(tmp_path), "") not in found


def test_a_model_may_be_one_file_or_a_name(tmp_path: Path) -> None:
    file, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    file.write_bytes(b"x")
    other.write_bytes(b"x")
    assert model_identity(str(file), "") == model_identity(str(other), "")
    assert model_identity("org/model", "main") == "hub org/model@main"


def test_a_change_at_the_beginning_in_the_middle_or_at_the_end_is_seen(tmp_path: Path) -> None:
    size = 16 * SAMPLE_SIZE  # all of it is sampled
    file = tmp_path / "a.bin"
    file.write_bytes(bytes(size))
    found = {model_identity(str(file), "")}
    for at in (0, size // 2, size - 1):
        file.write_bytes(bytes(at) + b"x" + bytes(size - at - 1))
        found.add(model_identity(str(file), ""))
    assert len(found) == 4
