# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The engine's groups of KV cache layers: their contents, or why they are rejected.

A model with uniform layers has one group. A hybrid model has several with their own block ids: full
attention combined with windowed layers, or with recurrent layers, whose blocks are states. Groups
share memory, so each has its own layout.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from beluga.connectors.vllm.layout import GroupLayout
from beluga.connectors.vllm.shards import head_shards
from beluga.errors import ConnectorError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from beluga.connectors.vllm.parts import BlockPart
    from beluga.connectors.vllm.shards import HeadShards

# Kinds of layers whose computed blocks serve every request with the same tokens.
KINDS = ("FullAttentionSpec", "MLAAttentionSpec")
# Kinds whose blocks serve a request only at the end of its prefix: a window before it, or a state.
BOUNDARY_KINDS = (
    *("SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec", "MambaSpec"),
)


class LayerGroup:
    """One of the engine's groups of layers."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, number: int) -> None:
        self._config, self._kv_cache, self.number = vllm_config, kv_cache_config, number
        group = kv_cache_config.kv_cache_groups[number]
        spec = group.kv_cache_spec
        self.specs: dict[str, Any] = getattr(spec, "kv_cache_specs", None) or dict.fromkeys(
            group.layer_names, spec
        )
        if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
            raise ConnectorError(
                "calculate_kv_scales gives each engine its own scales, which are not part of a "
                "shared block; start vLLM without it"
            )

    def refuse_others(self, kinds: Sequence[str]) -> None:
        """Raise ConnectorError for layers of other kinds."""
        for name, spec in self.specs.items():
            if type(spec).__name__ not in kinds:
                raise ConnectorError(
                    f"{name} has a {type(spec).__name__}, which is not supported; use a model with "
                    f"{', '.join(kinds[:-1])} and {kinds[-1]} only"
                )

    def layout(self, tensors: Mapping[str, Any]) -> GroupLayout:
        """Return the layout of blocks in the tensors that the engine registers."""
        made = GroupLayout(
            tensors,
            block_count=self._kv_cache.num_blocks,
            page_sizes=self.page_sizes(),
        )
        made.states = any(hasattr(spec, "mamba_cache_mode") for spec in self.specs.values())
        return made

    def layers(self, heads: int = 0) -> dict[str, str]:
        """Describe the cache of every layer, with the model's ``heads`` or those of this rank.
        Block sizes are in the layout instead.
        """
        return {name: _described(spec, heads) for name, spec in self.specs.items()}

    def page_sizes(self) -> dict[str, int]:
        """Return the bytes of a page of each layer."""
        return {name: _page_size(spec) for name, spec in self.specs.items()}

    @property
    def order(self) -> str:
        """vLLM's name of the order of axes in memory, such as LBHNC."""
        named = self._kv_cache.kv_cache_layout
        return str(getattr(named, "name", named))

    def packing(self) -> str:
        """Describe what the attention backends do inside a page: their names, and on a CPU their
        kernels' names.
        """
        made = self._config.compilation_config.static_forward_context
        backends = set()
        for name in self.specs:
            layer = made.get(name)
            backend = getattr(layer, "attn_backend", None)
            get_name = getattr(backend, "get_name", None)
            backends.add(
                f"{get_name() if get_name else backend} {getattr(layer, 'isa', '')}".strip()
            )
        return f"{self._kv_cache.kv_cache_layout} {sorted(backends)} {self._isa()}"

    def _isa(self) -> str:
        """Return the instruction set that the CPU backend packs pages for."""
        import torch

        on_cpu = self._config.device_config.device_type == "cpu"
        return str(torch.backends.cpu.get_cpu_capability()) if on_cpu else ""


class CacheGroup(LayerGroup):
    """The only group of a model whose layers have the same shape and attend to the whole prefix,
    checked at the start. Raises :class:`~beluga.errors.ConnectorError`.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
            raise ConnectorError(
                f"this model's KV cache has {len(groups)} groups of layers ({', '.join(kinds)}), "
                "but only one is supported here; serve this model with the BelugaConnector"
            )
        super().__init__(vllm_config, kv_cache_config, 0)
        self.refuse_others(KINDS)
        dcp = vllm_config.parallel_config.decode_context_parallel_size
        size = kv_cache_config.hash_block_size or vllm_config.cache_config.block_size * dcp
        self.block_size: int = size


class CacheGroups:
    """All groups whose blocks serve other requests, checked at the start. ``hybrid`` means that a
    block may serve a prefix only together with blocks of other groups or of a window. Raises
    :class:`~beluga.errors.ConnectorError`.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        groups = kv_cache_config.kv_cache_groups
        numbers = range(len(groups))
        self.hybrid = len(groups) != 1 or not _is_plain(groups[0].kv_cache_spec)
        self.groups: list[LayerGroup]
        if not self.hybrid:
            plain = CacheGroup(vllm_config, kv_cache_config)
            self.groups, self.block_size = [plain], plain.block_size
            return
        # Others are scratch memory of a request, which no other request can use.
        numbers = kv_cache_config.prefix_cacheable_group_ids
        self.groups = [LayerGroup(vllm_config, kv_cache_config, number) for number in numbers]
        if not self.groups:
            raise ConnectorError(
                "no block of this model's KV cache serves another request; start vLLM without "
                "the BelugaConnector"
            )
        for group in self.groups:
            group.refuse_others((*KINDS, *BOUNDARY_KINDS))
        _check_hybrid(vllm_config, self.groups)

    def layouts(self, tensors: Mapping[str, Any]) -> list[GroupLayout]:
        """Return the layout of each group's blocks in the tensors that the engine registers."""
        if not self.hybrid:
            return [self.groups[0].layout(tensors)]
        return [
            group.layout({name: tensors[name] for name in group.specs}) for group in self.groups
        ]

    def shards(self, layout: GroupLayout, part: BlockPart) -> HeadShards | None:
        """Return the parts of other engines' blocks that a rank can read, if parts are named by
        heads.
        """
        order = self.groups[0].order
        return (
            None if self.hybrid else head_shards(layout, part, order, self.groups[0].page_sizes())
        )

    def layers(self, heads: int = 0) -> dict[str, str]:
        """Describe the cache of every layer, with its group if there are several."""
        kinds: dict[str, str] = {}
        for group in self.groups:
            suffix = f" group={group.number}" if self.hybrid else ""
            kinds |= {name: kind + suffix for name, kind in group.layers(heads).items()}
        return kinds

    def specs(self) -> Iterator[Any]:
        """Yield the specs of all layers."""
        for group in self.groups:
            yield from group.specs.values()

    def packing(self) -> str:
        """Describe what the attention backends do inside a page, for each group."""
        return "; ".join(group.packing() for group in self.groups)


def _check_hybrid(vllm_config: Any, groups: Sequence[LayerGroup]) -> None:
    """Raise for a hybrid model whose blocks cannot serve another engine."""
    parallel = vllm_config.parallel_config
    for name in ("pipeline", "decode_context", "prefill_context"):
        if getattr(parallel, f"{name}_parallel_size") > 1:
            raise ConnectorError(
                f"{name}_parallel_size is {getattr(parallel, f'{name}_parallel_size')}, but with "
                "several groups of layers only 1 is supported; set it to 1"
            )
    modes = {
        str(spec.mamba_cache_mode)
        for group in groups
        for spec in group.specs.values()
        if hasattr(spec, "mamba_cache_mode")
    }
    if modes - {"align"}:
        raise ConnectorError(
            f"mamba_cache_mode is {', '.join(sorted(modes))}, which keeps no state for other "
            "requests; start vLLM with --enable-prefix-caching"
        )


def _is_plain(spec: Any) -> bool:
    """Return whether every layer of a group attends to the whole prefix."""
    specs = getattr(spec, "kv_cache_specs", None)
    return all(type(layer).__name__ in KINDS for layer in (specs.values() if specs else [spec]))


def _page_size(spec: Any) -> int:
    """Return the bytes of a page without its padding."""
    names = ("unpadded_page_size_bytes", "real_page_size_bytes", "page_size_bytes")
    return next(int(getattr(spec, name)) for name in names if hasattr(spec, name))


def _described(spec: Any, heads: int = 0) -> str:
    if type(spec).__name__ in BOUNDARY_KINDS:  # the fields of such a kind are all its own
        fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        return f"{type(spec).__name__} {fields}"
    return (
        f"{type(spec).__name__} heads={heads or spec.num_kv_heads} size={spec.head_size}"
        f"/{getattr(spec, 'head_size_v', None)} dtype={spec.dtype}"
        f" quant={getattr(spec, 'kv_quant_mode', None)}"
        f" states={getattr(spec, 'tokens_per_state', 1)}"
        f" window={getattr(spec, 'sliding_window', None)}"
    )
