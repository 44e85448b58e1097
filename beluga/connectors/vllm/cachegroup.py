# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The engine's one group of KV cache layers: its contents, or why it is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from beluga.connectors.vllm.layout import BlockLayout
from beluga.errors import ConnectorError

if TYPE_CHECKING:
    from collections.abc import Mapping

# Kinds of layers whose blocks, once computed, serve every request with the same tokens.
KINDS = ("FullAttentionSpec", "MLAAttentionSpec")


class CacheGroup:
    """A cache group, checked at the start. Raises :class:`~beluga.errors.ConnectorError`."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._config, self._kv_cache = vllm_config, kv_cache_config
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
            raise ConnectorError(
                f"this model's KV cache has {len(groups)} groups of layers ({', '.join(kinds)}); "
                "beluga serves models with one. Hybrid attention without recurrent layers has one "
                "with --disable-hybrid-kv-cache-manager"
            )
        spec = groups[0].kv_cache_spec
        self.specs: dict[str, Any] = getattr(spec, "kv_cache_specs", None) or dict.fromkeys(
            groups[0].layer_names, spec
        )
        for name, one in self.specs.items():
            if type(one).__name__ not in KINDS:
                raise ConnectorError(
                    f"{name} has a {type(one).__name__}; beluga serves {' and '.join(KINDS)}"
                )
        cache = vllm_config.cache_config
        if getattr(cache, "calculate_kv_scales", False):
            raise ConnectorError(
                "calculate_kv_scales gives each engine scales of its own, which a shared block "
                "does not carry; start vLLM without it"
            )
        dcp = vllm_config.parallel_config.decode_context_parallel_size
        self.block_size: int = kv_cache_config.hash_block_size or cache.block_size * dcp

    def layout(self, tensors: Mapping[str, Any]) -> BlockLayout:
        """Return where blocks lie in the tensors that the engine registers."""
        return BlockLayout(
            tensors,
            block_count=self._kv_cache.num_blocks,
            page_sizes={
                name: int(getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes))
                for name, spec in self.specs.items()
            },
        )

    def layers(self) -> dict[str, str]:
        """Describe the cache of every layer. Block sizes are in the layout instead."""
        return {
            name: f"{type(spec).__name__} heads={spec.num_kv_heads} size={spec.head_size}"
            f"/{getattr(spec, 'head_size_v', None)} dtype={spec.dtype}"
            f" quant={getattr(spec, 'kv_quant_mode', None)}"
            f" states={getattr(spec, 'tokens_per_state', 1)}"
            f" window={getattr(spec, 'sliding_window', None)}"
            for name, spec in self.specs.items()
        }

    def packing(self) -> str:
        """Describe what the attention backends do inside a page: their names, and on a CPU their
        kernels' names.
        """
        made = self._config.compilation_config.static_forward_context
        found = set()
        for name in self.specs:
            layer = made.get(name)
            backend = getattr(layer, "attn_backend", None)
            get_name = getattr(backend, "get_name", None)
            found.add(f"{get_name() if get_name else backend} {getattr(layer, 'isa', '')}".strip())
        return f"{self._kv_cache.kv_cache_layout} {sorted(found)} {self._isa()}"

    def _isa(self) -> str:
        """Return the instruction set that the CPU backend packs pages for."""
        import torch

        on_cpu = self._config.device_config.device_type == "cpu"
        return str(torch.backends.cpu.get_cpu_capability()) if on_cpu else ""
