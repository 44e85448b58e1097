# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The namespace of an engine that calls a storage plugin.

The keys of such an engine identify the tokens and little else. Everything else that changes the
bytes must be in the namespace. If the engine does not pass it to its plugins, the user adds it
(``variant``).
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from beluga.connectors.settings import PoolSettings
from beluga.kvcache import Namespace

Fields: TypeAlias = "dict[str, str | int | bytes]"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(PoolSettings):
    """The settings of a plugin. ``variant`` is any text for properties that change the bytes but
    are not passed to plugins.

    Examples are a model's revision, and fp8_e4m3 against fp8_e5m2, which both appear as bytes.
    """

    variant: str = ""


def major(version: str) -> str:
    """Return the part of a version whose change may change layouts; for 0.x.y this includes x."""
    parts = version.partition("+")[0].split(".")
    return ".".join(parts[: 2 if parts[0] == "0" else 1])


def namespace_of(settings: EngineSettings, engine: str, version: str, fields: Fields) -> Namespace:
    """Return the namespace of ``fields`` in this engine, at this version."""
    always: Fields = {
        "engine": engine,
        "engine_version": major(version),
        "variant": settings.variant,
    }
    return Namespace(always | fields, salt=settings.salt).of_tenant(settings.tenant)
