# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Compares our tables with the real ``ServerArgs`` of SGLang and the real metadata of LMCache.

Run it in .venv-adapters: adapter_fields.py POOL. It prints the names in the tables that these lack,
and whether LMCache's metadata of an engine have a canonical form, as one line of JSON.
"""

from __future__ import annotations

import dataclasses
import json

import msgspec
import sglang_weights_role as role
import torch
from lmcache.v1.metadata import LMCacheMetadata

from beluga.connectors.lmcache.identity import LEFT_OUT as LMCACHES
from beluga.connectors.lmcache.identity import metadata_fields
from beluga.connectors.sglang.fields import LEFT_OUT as SGLANGS

arguments = role.load("sglang.srt.server_args").ServerArgs
sglangs = {field.name for field in msgspec.structs.fields(arguments)}
lmcaches = {field.name for field in dataclasses.fields(LMCacheMetadata)}


def metadata(**changes: object) -> LMCacheMetadata:
    """Return LMCache's metadata of a rank."""
    usual = {
        "model_name": "org/model",
        "world_size": 1,
        "local_world_size": 1,
        "worker_id": 0,
        "local_worker_id": 0,
        "kv_dtype": torch.bfloat16,
        "kv_shape": (4, 2, 16, 1, 64),
    }
    return LMCacheMetadata(**(usual | changes))


base = metadata_fields(metadata(), "")
print(
    json.dumps(
        {
            "unknown": sorted(
                (SGLANGS["ServerArgs"].keys() - sglangs)
                | (LMCACHES["LMCacheMetadata"].keys() - lmcaches)
            ),
            "counted": sorted(lmcaches - LMCACHES["LMCacheMetadata"].keys()),
            "alike": metadata_fields(metadata(worker_id=1, role="worker"), "") == base,
            "apart": metadata_fields(metadata(use_mla=True), "") != base,
        }
    )
)
