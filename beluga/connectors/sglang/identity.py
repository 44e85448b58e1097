# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The identity of an SGLang engine: its whole configuration, and the weights it started with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from beluga.connectors.identity import (
    SET_IDENTITY,
    Fields,
    Model,
    ModelIdentity,
    Several,
    Source,
    counted,
    digest_of,
    engine_start_ns,
    environment,
    source_of,
    sources_of,
)
from beluga.errors import ConnectorError

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

_VARIABLES = "SGLANG_|SGL_"


def settings() -> Mapping[str, Any]:
    """Return SGLang's resolved settings, or none in a process without settings."""
    try:
        from sglang.srt.runtime_context import get_context

        context = get_context()
        if hasattr(context, "resolved_server_args_dict"):
            resolved: Mapping[str, Any] = context.resolved_server_args_dict()
            return resolved
        return dict(vars(context.server_args))
    except (ImportError, ValueError, AttributeError):
        return {}


def config_of(arguments: Mapping[str, Any], identity: str) -> Fields:
    """Return the fields of a namespace for SGLang's settings and environment. ``identity`` is the
    operator's declaration.

    Raises ConnectorError for a value that cannot be compared.
    """
    config = counted(arguments, "ServerArgs")
    return {
        "config": digest_of(config, path="ServerArgs", identity=identity),
        "context_length": str(arguments.get("context_length")),
        "environment": digest_of(environment(_VARIABLES)),
    }


def identify(
    arguments: Mapping[str, Any],
    identity: str,
    *,
    logger: logging.Logger,
    then: Callable[[str], None],
) -> ModelIdentity:
    """Begin to identify the weights that SGLang started with, and the files that its settings name,
    in a thread.

    Raises ConnectorError, with a hint to the setting ``identity``, for weights that cannot be
    identified.
    """
    since_ns = engine_start_ns()
    source = sources_of(
        _models(arguments, since_ns),
        identity,
        since_ns,
        config=counted(arguments, "ServerArgs"),
        variables=environment(_VARIABLES),
    )
    # The ids of adapters, in the names of pages, depend on name and path and not on their bytes.
    # Adapters that are loaded later have random ids.
    adapters = [
        (str(ref.lora_name), str(ref.lora_path)) for ref in arguments.get("lora_paths") or ()
    ]
    for name, path in () if identity else sorted(adapters):
        source = Several([source, Source(name), source_of(Model(path, since_ns=since_ns))])
    return ModelIdentity(source, logger=logger, then=then)


def _models(arguments: Mapping[str, Any], since_ns: int) -> Iterator[Model]:
    path = arguments.get("model_path")
    if not path:
        raise ConnectorError(f"SGLang's settings contain no model; {SET_IDENTITY}")
    form = arguments.get("load_format")
    yield _model(arguments, str(path), arguments.get("revision"), form, since_ns)
    draft = arguments.get("speculative_draft_model_path")
    if draft and draft != path:
        form = arguments.get("speculative_draft_load_format") or form
        revision = arguments.get("speculative_draft_model_revision")
        yield _model(arguments, str(draft), revision, form, since_ns)


def _model(
    arguments: Mapping[str, Any], path: str, revision: Any, form: Any, since_ns: int
) -> Model:
    load_format = str(getattr(form, "value", form) or "auto")
    if arguments.get("custom_weight_loader") or arguments.get("modelexpress_config"):
        load_format = "custom"  # it reads from elsewhere, and is refused
    return Model(
        path,
        load_format=load_format,
        seed=arguments.get("random_seed"),
        revision=None if revision is None else str(revision),
        cache=arguments.get("download_dir"),
        since_ns=since_ns,
    )
