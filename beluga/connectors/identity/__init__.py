# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The identity that two engines must share to share blocks, and how it is determined.

``canonical``  an engine's whole configuration as a digest, without the fields of a reviewed table
``files``      digests of files: all bytes, on several threads, cached between runs ``models`` where
a model's weights come from, and the digest that identifies them

Each engine has one table of fields that cannot change the bytes of a block (``vllm/fields.py``,
``sglang/fields.py``, ``lmcache/fields.py``). All other fields are part of the identity. A model
that cannot be identified is rejected, unless the operator sets ``identity``.
"""

from __future__ import annotations

from beluga.connectors.identity.canonical import (
    Table,
    canonical,
    config_fields,
    digest_of,
    values_under,
)
from beluga.connectors.identity.files import FileDigests, FileState, Signature, signature
from beluga.connectors.identity.models import (
    Identified,
    Model,
    ModelIdentity,
    source_of,
    with_weights,
)

__all__ = [
    "FileDigests",
    "FileState",
    "Identified",
    "Model",
    "ModelIdentity",
    "Signature",
    "Table",
    "canonical",
    "config_fields",
    "digest_of",
    "signature",
    "source_of",
    "values_under",
    "with_weights",
]
