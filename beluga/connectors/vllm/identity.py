# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The identity of a vLLM engine: the namespaces of its ranks, and its model.

vLLM's block hashes cover tokens, LoRA names, images and cache salts. The namespace has everything
else: the configuration and the environment by the rule of :mod:`beluga.connectors.identity`, the
layout and packing, the rank, and the weights. The workers build their namespaces without the
weights. The scheduler identifies the weights once for all ranks, on a thread, and adds their digest
to its orders.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from beluga.connectors.identity import (
    COMMIT,
    SET_IDENTITY,
    Model,
    ModelIdentity,
    config_fields,
    digest_of,
    engine_start_ns,
    environment,
    sources_of,
)
from beluga.errors import ConnectorError
from beluga.kvcache import Namespace

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from beluga.connectors.vllm.layout import GroupLayout

PART = "tp"  # the namespace field with the rank's part of a block
HASHES = ("sha256", "sha256_cbor")  # the others are seeded per process


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
    variables: Collection[str] = (),
) -> Namespace:
    """Return the namespace of a rank, without the weights. ``config`` is a ``VllmConfig``;
    ``version`` is vLLM's; ``identity`` is the operator's text for fields without a canonical form.

    ``layers`` gives the kind of cache of every layer in the cache groups; ``packing`` describes
    what the attention backends do inside a page; ``part`` names the rank's part of a block
    (``parts``); ``others`` are the layouts of further groups. ``declared`` names the layout in
    place of its own name. ``variables`` are those of the environment that vLLM reads.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    sections = config_fields(config, identity=identity)
    return Namespace(
        {
            "engine": "vllm",
            "engine_version": version,
            **{f"config {name}": digest for name, digest in sections.items()},
            # Some fields repeat what is in the configuration, for operators to read.
            "max_model_len": int(model.max_model_len),
            "quantization": str(model.quantization),
            "dtype": str(model.dtype),
            "kv_dtype": str(cache.cache_dtype),
            "block_size": int(cache.block_size),
            "hash": str(cache.prefix_caching_hash_algo),
            "layout": declared or "; ".join(each.declared for each in (layout, *others)),
            "packing": packing,
            "layers": digest_of(dict(layers)),
            "environment": digest_of(environment("VLLM_", variables)),
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


def identify(
    config: Any, identity: str, *, variables: Collection[str] = (), **identified: Any
) -> ModelIdentity:
    """Begin to identify the weights of an engine, and the files that its configuration names, in a
    thread. ``identity`` is the operator's name for the weights. ``identified`` are parameters of
    ModelIdentity.

    Raises ConnectorError, with one line that names the setting ``identity``, for weights that
    cannot be identified.
    """
    since_ns = _began_ns(config)
    models, read = _models(config, since_ns), environment("VLLM_", variables)
    source = sources_of(models, identity, since_ns, config=config, variables=read)
    return ModelIdentity(source, **identified)


def _models(config: Any, since_ns: int) -> Iterator[Model]:
    """Yield the models whose KV an engine's blocks have. Raises ConnectorError."""
    yield _model(config.model_config, config.load_config, since_ns)
    speculative = getattr(config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and _is_other(draft, config.model_config):
        load = getattr(speculative, "draft_load_config", None) or config.load_config
        yield _model(draft, load, since_ns)


def _is_other(draft: Any, model: Any) -> bool:
    """Return whether a draft has other weights than the model. Without a revision, one of the same
    name is a part of the model.
    """
    if str(draft.model) != str(model.model):
        return True
    revisions = [getattr(each, "revision", None) for each in (draft, model)]
    own, other = (str(getattr(each, "resolved", None) or each or "") for each in revisions)
    return own not in {"", other}


def _model(model: Any, load: Any, since_ns: int) -> Model:
    load_format = str(getattr(load.load_format, "value", load.load_format))
    if load_format != "dummy":
        _check_code(model)
    revision = model.revision
    return Model(
        str(model.model),
        load_format=load_format,
        seed=model.seed,
        revision=None if revision is None else str(revision),
        commit=getattr(revision, "resolved", None),
        url=str(getattr(model, "model_weights", "") or ""),
        cache=load.download_dir,
        since_ns=since_ns,
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
    for name in _code(model.hf_config.to_dict()):
        if "--" in name:
            raise ConnectorError(
                f"the model {model.model} has code of another repository "
                f"({name.partition('--')[0]}), which beluga cannot identify; {SET_IDENTITY}"
            )


def _code(tree: Any, *, inside: bool = False) -> Iterator[str]:
    """Yield all texts below a key ``auto_map`` of nested dictionaries and lists."""
    if isinstance(tree, str):
        yield from [tree] if inside else []
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _code(value, inside=inside or key == "auto_map")
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _code(value, inside=inside)


def _began_ns(config: Any) -> int:
    """Return a time before the engine started to load: when its configuration was made, otherwise
    when its process started.
    """
    made = str(getattr(config, "instance_id", ""))
    now = time.time_ns()
    if made.isdecimal() and now - (1 << 53) < int(made) <= now:  # at most 104 days ago
        return int(made)
    return engine_start_ns()
