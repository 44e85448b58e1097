# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Whose blocks these are: the namespace of an engine that is no connector of ours, but calls one.

Such an engine's keys say which tokens, and little more. Whatever else changes the bytes must be in
the namespace; what the engine does not tell its plugins, its user says (``variant``).
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from beluga.connectors.settings import PoolSettings
from beluga.kvcache import Namespace

Fields: TypeAlias = "dict[str, str | int | bytes]"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(PoolSettings):
    """``variant``: what changes the bytes and the engine does not tell its plugins, in any words.

    For example a model's revision, or fp8_e4m3 against fp8_e5m2, which both come as bytes.
    """

    variant: str = ""


def major(version: str) -> str:
    """What of a version changes when layouts may: of 0.x.y also the x."""
    parts = version.partition("+")[0].split(".")
    return ".".join(parts[: 2 if parts[0] == "0" else 1])


def namespace_of(settings: EngineSettings, engine: str, version: str, fields: Fields) -> Namespace:
    """The namespace of ``fields`` in this engine, at this version."""
    always: Fields = {
        "engine": engine,
        "engine_version": major(version),
        "variant": settings.variant,
    }
    return Namespace(always | fields, salt=settings.salt)
