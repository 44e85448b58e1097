# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Media: distinguishes blocks that depend on a hash of contents from those that depend on a name
chosen by a client.

vLLM names an image by the hash of its contents, or by the ``uuid`` that its client sends. Both are
text in the hashes of blocks, and a client may choose a name that looks like a hash. So the process
that hashes contents marks what it has hashed (:func:`mark_contents`, in every process of vLLM by
the plugin), and nothing that a client sends keeps the mark. The scheduler's side shares only
blocks that depend on marked names alone. All others, and the blocks after them, are found only by
the same engine process.
"""

from __future__ import annotations

import functools
from typing import Any

MARK = "beluga-content-"
_INPUTS = ("vllm.multimodal.processing.inputs", "ProcessorInputs", "get_mm_hashes")
_PROCESSOR = ("vllm.v1.engine.input_processor", "InputProcessor", "_get_mm_identifier")


class ContentHash(str):
    """A hash of contents made by this process. Its type never leaves the process."""

    __slots__ = ()


def private_from(request: Any, block_size: int) -> int | None:
    """Return a request's first block that depends on a name that a client chose, or None. vLLM
    may put an adapter's name and a colon in front of a medium's.
    """
    positions = [
        feature.mm_position.offset
        for feature in getattr(request, "mm_features", None) or ()
        if not (feature.identifier or "").rpartition(":")[2].startswith(MARK)
    ]
    return min(positions) // block_size if positions else None


def mark_contents() -> None:
    """Mark names of contents in this process. A second call does nothing. In a vLLM without these
    functions nothing is marked, and no block with media is shared.
    """
    inputs, processor = _owner_of(_INPUTS), _owner_of(_PROCESSOR)
    if inputs is None or processor is None:
        return
    for owner, name, wrapped in (
        (inputs, _INPUTS[2], _hashing),
        (processor, _PROCESSOR[2], _identifying),
    ):
        call = getattr(owner, name)
        if not hasattr(call, "beluga"):
            setattr(owner, name, wrapped(call))


def _hashing(call: Any) -> Any:
    """Wrap vLLM's function from media items to their names."""

    @functools.wraps(call)
    def get_mm_hashes(self: Any, *arguments: Any, **named: Any) -> Any:
        hashes_by_modality = call(self, *arguments, **named)
        chosen = self.mm_uuid_items or {}
        marked = {}
        for modality, hashes in hashes_by_modality.items():
            names = chosen.get(modality) or [None] * len(hashes)
            items = self.mm_data_items[modality].get_all_items_for_hash()
            marked[modality] = [
                digest if name is not None or _is_named(item) else ContentHash(digest)
                for digest, name, item in zip(hashes, names, items, strict=True)
            ]
        return marked

    get_mm_hashes.beluga = True  # type: ignore[attr-defined]
    return get_mm_hashes


def _identifying(call: Any) -> Any:
    """Wrap vLLM's function from an item's name to what the hashes of blocks contain."""

    @functools.wraps(call)
    def _get_mm_identifier(self: Any, mm_hash: str, *arguments: Any, **named: Any) -> Any:
        if isinstance(mm_hash, ContentHash):
            return call(self, MARK + str.__str__(mm_hash), *arguments, **named)
        return call(self, mm_hash.replace(MARK, "named-"), *arguments, **named)

    _get_mm_identifier.beluga = True  # type: ignore[attr-defined]
    return _get_mm_identifier


def _is_named(item: Any) -> bool:
    """Return whether vLLM hashes the id in an image's EXIF data in place of its contents."""
    image = getattr(item, "media", item)
    if not hasattr(image, "getexif"):
        return False
    from vllm.multimodal import hasher

    image_id = getattr(hasher, "_get_image_id_bytes", None)
    return image_id is not None and image_id(image) is not None


def _owner_of(where: tuple[str, str, str]) -> Any:
    import importlib

    module, owner, method = where
    try:
        cls = getattr(importlib.import_module(module), owner, None)
    except ImportError:
        return None
    return cls if hasattr(cls, method) else None
