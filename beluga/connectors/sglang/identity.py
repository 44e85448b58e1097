# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The identity of an SGLang engine: its whole configuration, and the weights it started with.

SGLang reads several hundred environment variables. Those that are set count if their names have one
of the words for what they compute with: types, quantization, kernels of another kind, layouts,
experts, and code of others. Use ``variant`` for further ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beluga.config import variables_like
from beluga.connectors.identity import (
    Model,
    ModelIdentity,
    digest_of,
    source_of,
    values_under,
)
from beluga.connectors.identity.models import SET_IDENTITY, Declared, Several, WeightsSource
from beluga.connectors.naming import Fields
from beluga.connectors.process import engine_start_ns
from beluga.connectors.sglang.fields import LEFT_OUT
from beluga.errors import ConnectorError

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

# Load formats that read the weights from the model's folder or the hub.
READ_FROM_MODEL = {
    *("auto", "safetensors", "pt", "npcache", "mistral", "gguf", "bitsandbytes"),
    *("sharded_state", "layered", "fastsafetensors", "runai_streamer"),
}
# Environment variables that count.
_WORDS = (
    *("FP4", "FP8", "FP16", "FP32", "BF16", "TF32", "INT4", "INT8", "MXFP", "DTYPE", "PRECISION"),
    *("QUANT", "SCALE", "DEEPGEMM", "DEEP_GEMM", "AITER", "MARLIN", "SIMULATE", "EXPERTS"),
    *("HND", "LAYOUT", "ROPE", "EXTERNAL_M", "USE_CPU_ENGINE", "OVERRIDE_KV", "VIDEO", "IMAGE"),
)
_VARIABLES = re.compile(rf"(SGLANG|SGL)_\w*({'|'.join(_WORDS)})\w*")
# Kinds of rotary embeddings that compute the same for every context length.
ROPES_OF_ANY_LENGTH = {"default", "linear", "llama3", "yarn", "mrope", "dynamic", "proportional"}


def settings() -> Mapping[str, Any]:
    """Return SGLang's resolved settings, or none in a process without settings."""
    try:
        from sglang.srt.runtime_context import get_context

        context = get_context()
        if hasattr(context, "resolved_server_args_dict"):
            found: Mapping[str, Any] = context.resolved_server_args_dict()
            return found
        return dict(vars(context.server_args))
    except (ImportError, ValueError, AttributeError):
        return {}


def config_of(found: Mapping[str, Any], identity: str) -> Fields:
    """Return the fields of a namespace for SGLang's settings. ``identity`` is the operator's
    declaration.

    Raises ConnectorError for a value that cannot be compared.
    """
    left_out, environment = LEFT_OUT["ServerArgs"], variables_like(_VARIABLES)
    counted = {name: value for name, value in found.items() if name not in left_out}
    return {
        "config": digest_of(counted, LEFT_OUT, path="ServerArgs", identity=identity),
        "length": _length(found),
        "environment": digest_of(environment, {}) if environment else "",
    }


def identify(
    found: Mapping[str, Any],
    identity: str,
    *,
    logger: logging.Logger,
    then: Callable[[str], None] | None = None,
) -> ModelIdentity:
    """Begin to identify the weights that SGLang started with, in a thread.

    Raises ConnectorError, with a hint to the setting ``identity``, for weights that cannot be
    identified.
    """
    if identity:
        return ModelIdentity(Declared(f"declared {identity}"), logger=logger, then=then)
    sources = list(_sources(found))
    source = sources[0] if len(sources) == 1 else Several(sources)
    return ModelIdentity(source, logger=logger, then=then)


def _sources(found: Mapping[str, Any]) -> Iterator[WeightsSource]:
    path = found.get("model_path")
    if not path:
        raise ConnectorError(f"SGLang's settings contain no model; {SET_IDENTITY}")
    yield _source(found, str(path), found.get("revision"), found.get("load_format"))
    draft = found.get("speculative_draft_model_path")
    if draft and draft != path:
        form = found.get("speculative_draft_load_format") or found.get("load_format")
        yield _source(found, str(draft), found.get("speculative_draft_model_revision"), form)
    # Their ids, in the names of pages, depend on name and path and not on their bytes. Adapters
    # that are loaded later have random ids.
    adapters = [(str(one.lora_name), str(one.lora_path)) for one in found.get("lora_paths") or ()]
    for name, place in sorted(adapters):
        yield Several([Declared(name), source_of(Model(place, since_ns=engine_start_ns()))])


def _source(found: Mapping[str, Any], path: str, revision: Any, form: Any) -> WeightsSource:
    form = str(getattr(form, "value", form) or "auto")
    if form == "dummy":
        return Declared(f"dummy {found.get('random_seed')}")
    remote = found.get("custom_weight_loader") or found.get("modelexpress_config")
    if form not in READ_FROM_MODEL or remote:
        raise ConnectorError(
            f"it is unknown where the load format {form} finds the weights of {path}; "
            f"{SET_IDENTITY}"
        )
    return source_of(
        Model(
            path,
            revision=None if revision is None else str(revision),
            cache=found.get("download_dir"),
            since_ns=engine_start_ns(),
        )
    )


def _length(found: Mapping[str, Any]) -> str:
    """Return the context length if the model's positions may depend on it."""
    length = str(found.get("context_length"))
    path = Path(str(found.get("model_path") or "")) / "config.json"
    try:
        text = path.read_text()
        override = str(found.get("json_model_override_args") or "{}")
        trees = [json.loads(text), json.loads(override)]
    except (OSError, ValueError):
        return length  # the config could not be read
    kinds = {
        kind
        for tree in trees
        for name in ("rope_parameters", "rope_scaling")
        for rope in values_under(tree, name)
        for key in ("rope_type", "type")
        for kind in values_under(rope, key)
    }
    return length if kinds - ROPES_OF_ANY_LENGTH else "any"
