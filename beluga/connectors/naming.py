# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Names for weights, and the namespace of an engine that calls a storage plugin.

The keys of such an engine name the tokens and little more. Everything else that changes the bytes
must be in the namespace. If the engine does not pass it to its plugins, the user adds it
(``variant``).
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import TypeAlias

from beluga.connectors.settings import PoolSettings
from beluga.kvcache import Namespace

Fields: TypeAlias = "dict[str, str | int | bytes]"

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
SAMPLES, SAMPLE_SIZE = 16, 1 << 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(PoolSettings):
    """The settings of a plugin. ``variant`` is any text for what changes the bytes but is not
    passed to plugins.

    Examples are a model's revision, and fp8_e4m3 against fp8_e5m2, which both appear as bytes.
    """

    variant: str = ""


def major(version: str) -> str:
    """Return the part of a version whose change may change layouts; for 0.x.y it includes x."""
    parts = version.partition("+")[0].split(".")
    return ".".join(parts[: 2 if parts[0] == "0" else 1])


def namespace_of(settings: EngineSettings, engine: str, version: str, fields: Fields) -> Namespace:
    """Return the namespace of ``fields`` in this engine, at this version."""
    always: Fields = {
        "engine": engine,
        "engine_version": major(version),
        "variant": settings.variant,
    }
    return Namespace(always | fields, salt=settings.salt)


def model_identity(model: str, revision: str) -> str:
    """Return a name for the weights: the hub's name and revision, or a local directory's
    fingerprint.

    A path would not do: two machines may keep the same model in different places, and different
    models in the same place.
    """
    path = Path(model)
    return f"files {weights_fingerprint(path)}" if path.exists() else f"hub {model}@{revision}"


def weights_fingerprint(path: Path) -> str:
    """Return a digest of a directory's (or file's) weights: sizes, and samples spread over each
    file.
    """
    files = [path] if path.is_file() else sorted(set().union(*map(path.glob, WEIGHT_FILES)))
    digest = hashlib.blake2b(digest_size=16, person=b"beluga-weights")
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''} {size}\n".encode())
        with file.open("rb") as stream:
            for sample in range(SAMPLES):
                stream.seek(max(0, size - SAMPLE_SIZE) * sample // (SAMPLES - 1))
                digest.update(stream.read(SAMPLE_SIZE))
    return digest.hexdigest()
