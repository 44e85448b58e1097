# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The identity of a vLLM engine: the namespaces of its ranks, and its model.

vLLM's block hashes cover tokens, LoRA names, images and cache salts. The namespace has everything
else that changes the bytes of a block: the engine's whole configuration (except the reviewed fields
of :mod:`~beluga.connectors.vllm.fields`), the layout and packing, the rank, the engine, and the
weights. The workers build their namespaces without the weights. The scheduler identifies the
weights once for all ranks, on a thread, and adds their digest to its orders.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from beluga.connectors.identity import (
    Model,
    ModelIdentity,
    config_fields,
    digest_of,
    source_of,
    values_under,
)
from beluga.connectors.identity.models import COMMIT, SET_IDENTITY, Declared, Several, WeightsSource
from beluga.connectors.naming import major
from beluga.connectors.process import engine_start_ns
from beluga.connectors.vllm.fields import LEFT_OUT
from beluga.errors import ConnectorError
from beluga.kvcache import Namespace

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Sequence

    from beluga.connectors.vllm.layout import GroupLayout

PART = "tp"  # the namespace field with the rank's part of a block
_NONE: Mapping[str, str] = {}

HASHES = ("sha256", "sha256_cbor")  # the others are seeded per process

# Kinds of rotary embeddings that compute the same for every max_model_len. Others (longrope) choose
# their factors by it.
ROPES_OF_ANY_LENGTH = {"default", "linear", "llama3", "yarn", "mrope", "dynamic", "proportional"}
# Models in which something else depends on it (Llama 4: the temperature of its attention).
MODELS_BY_LENGTH = {"llama4", "llama4_text"}

# Load formats that read the weights from the model's folder or URL. The location of others is only
# in their own settings.
READ_FROM_MODEL = {
    *("auto", "hf", "safetensors", "pt", "npcache", "mistral", "fastsafetensors", "instanttensor"),
    *("gguf", "bitsandbytes", "sharded_state", "runai_streamer", "runai_streamer_sharded"),
}


def check_hashing(algorithm: str) -> None:
    """Raise ConnectorError if other processes hash the same tokens differently."""
    if algorithm not in HASHES:
        raise ConnectorError(
            f"prefix_caching_hash_algo is {algorithm}, with which no other process finds a block; "
            "start vLLM with --prefix-caching-hash-algo sha256 (or sha256_cbor)"
        )


def namespace(  # noqa: PLR0913  keyword-only
    config: Any,
    *,
    version: str,
    layout: GroupLayout,
    packing: str,
    layers: Mapping[str, str],
    part: str,
    pp_rank: int,
    salt: str | bytes,
    identity: str = "",
    others: Sequence[GroupLayout] = (),
    declared: str = "",
    environment: Mapping[str, str] = _NONE,
) -> Namespace:
    """Return the namespace of a rank, without the weights. ``config`` is a ``VllmConfig``;
    ``version`` is vLLM's; ``identity`` is the operator's text for fields without a stable form.

    ``layers`` gives the kind of cache of every layer in the cache groups; ``packing`` describes
    what the attention backends do inside a page; ``part`` names the rank's part of a block
    (``parts``); ``others`` are the layouts of further groups.
    ``declared`` names the layout in place of its own name. ``environment`` are vLLM's variables
    that count (``environment``).
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    parts = config_fields(config, LEFT_OUT, identity=identity)
    return Namespace(
        {
            "engine": "vllm",
            "engine_version": major(version),
            **{f"config {name}": digest for name, digest in parts.items()},
            "length": int(model.max_model_len) if length_matters(model) else "any",
            "quantization": str(model.quantization),
            "dtype": str(model.dtype),
            "kv_dtype": str(cache.cache_dtype),
            "block_size": int(cache.block_size),
            "hash": str(cache.prefix_caching_hash_algo),
            "layout": declared or "; ".join(one.declared for one in (layout, *others)),
            "packing": packing,
            "layers": digest_of(dict(layers), {}),
            "environment": digest_of(dict(environment), {}) if environment else "",
            "device": layout.device,
            PART: part,
            "pp": f"{pp_rank}/{parallel.pipeline_parallel_size}",
            "cp": f"{parallel.decode_context_parallel_size}"
            f"/{parallel.prefill_context_parallel_size}",
            "group": 0,  # of blocks under the engine's hashes; others mix their group in
        },
        salt=salt,
    )


def of_part(space: Namespace, name: str) -> Namespace:
    """Return the namespace of another part of the same blocks."""
    return Namespace({**space.fields, PART: name}, salt=space.salt)


def length_matters(model: Any) -> bool:
    """Return whether a model computes a block differently for another ``max_model_len``."""
    if getattr(model, "trust_remote_code", False):  # the model's own code may use it
        return True
    found = model.hf_config.to_dict()
    kinds = set(values_under(found, "model_type"))
    ropes = {
        kind
        for name in ("rope_parameters", "rope_scaling")
        for rope in values_under(found, name)
        for kind in (*values_under(rope, "rope_type"), *values_under(rope, "type"))
    }
    return bool(ropes - ROPES_OF_ANY_LENGTH) or bool(kinds & MODELS_BY_LENGTH)


def identify(
    config: Any,
    identity: str,
    *,
    logger: logging.Logger,
    then: Callable[[str], None] | None = None,
    hashed: Callable[[int], None] = lambda _: None,
) -> ModelIdentity:
    """Begin to identify the weights of an engine, in a thread. ``identity`` is the operator's name
    for them. ``then`` is called with the digest; ``hashed`` with numbers of bytes.

    Raises ConnectorError, with one line that names the setting ``identity``, for weights that
    cannot be identified.
    """
    if identity:
        return ModelIdentity(
            Declared(f"declared {identity}"), logger=logger, then=then, hashed=hashed
        )
    sources = [_source(config, model, load) for model, load in _models(config)]
    source = sources[0] if len(sources) == 1 else Several(sources)
    return ModelIdentity(source, logger=logger, then=then, hashed=hashed)


def _models(config: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the configurations of the models whose KV an engine's blocks have, and how each is
    loaded.
    """
    yield config.model_config, config.load_config
    speculative = getattr(config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and _is_other(draft, config.model_config):
        yield draft, getattr(speculative, "draft_load_config", None) or config.load_config


def _is_other(draft: Any, model: Any) -> bool:
    """Return whether a draft has other weights than the model. Without a revision, one of the same
    name is a part of the model.
    """
    if str(draft.model) != str(model.model):
        return True
    revisions = [getattr(one, "revision", None) for one in (draft, model)]
    own, other = (str(getattr(one, "resolved", None) or one or "") for one in revisions)
    return own not in {"", other}


def _source(config: Any, model: Any, load: Any) -> WeightsSource:
    form = str(getattr(load.load_format, "value", load.load_format))
    if form == "dummy":
        return Declared(f"dummy {model.seed}")
    if form not in READ_FROM_MODEL:
        raise ConnectorError(
            f"it is unknown where the load format {form} finds the weights of "
            f"{model.model}; {SET_IDENTITY}"
        )
    _check_code(model)
    revision = model.revision
    return source_of(
        Model(
            str(model.model),
            revision=None if revision is None else str(revision),
            commit=getattr(revision, "resolved", None),
            url=str(getattr(model, "model_weights", "") or ""),
            cache=load.download_dir,
            since_ns=_began_ns(config),
        )
    )


def _check_code(model: Any) -> None:
    """Raise for a model whose code comes from another repository, or from a branch, whose commit
    vLLM does not record.
    """
    if not getattr(model, "trust_remote_code", False):
        return
    revision = getattr(model, "code_revision", None)
    if revision is not None and not COMMIT.fullmatch(str(revision)):
        raise ConnectorError(
            f"the model {model.model} has code of the revision {revision}, which may move; start "
            f"vLLM with --code-revision COMMIT (40 digits), or {SET_IDENTITY}"
        )
    code = values_under(model.hf_config.to_dict(), "auto_map")
    names = [name for one in code for name in _leaves(one) if "--" in name]
    if names:
        raise ConnectorError(
            f"the model {model.model} has code of another repository "
            f"({names[0].partition('--')[0]}), which beluga cannot identify; {SET_IDENTITY}"
        )


def _began_ns(config: Any) -> int:
    """Return a time before the engine started to load: when its configuration was made, otherwise
    when its process started.
    """
    made = str(getattr(config, "instance_id", ""))
    now = time.time_ns()
    if made.isdecimal() and now - (1 << 53) < int(made) <= now:  # at most 104 days ago
        return int(made)
    return engine_start_ns()


def _leaves(tree: Any) -> Iterator[str]:
    if isinstance(tree, Mapping):
        tree = tree.values()
    if isinstance(tree, str):
        yield tree
    elif tree is not None and not isinstance(tree, (int, float)):
        for value in tree:
            yield from _leaves(value)
