# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Media: blocks whose hash contains a client's name for an image are hits only in the same engine
process.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_parts import BLOCK_TOKENS, request

from beluga import Namespace
from beluga.connectors.vllm import media
from beluga.connectors.vllm.counters import ConnectorCounters
from beluga.connectors.vllm.lookups import Lookups
from beluga.connectors.vllm.media import MARK, ContentHash, mark_contents, private_from

TOKENS = list(range(6 * BLOCK_TOKENS))
CONTENT, NAME = MARK + 64 * "0", 64 * "0"  # a client's name may look like a hash


class Inputs:
    """vLLM's ProcessorInputs: items, and the names that clients gave to some."""

    def __init__(self, items: list[Any], uuids: list[str | None] | None) -> None:
        items_of_image = SimpleNamespace(get_all_items_for_hash=lambda: items)
        self.mm_data_items = {"image": items_of_image}
        self.mm_uuid_items = None if uuids is None else {"image": uuids}

    def get_mm_hashes(self, model_id: str) -> dict[str, list[str]]:
        items = self.mm_data_items["image"].get_all_items_for_hash()
        names = (self.mm_uuid_items or {}).get("image") or [None] * len(items)
        return {
            "image": [name or f"{model_id}{item}" for item, name in zip(items, names, strict=True)]
        }


class Processor:
    """vLLM's InputProcessor."""

    def _get_mm_identifier(self, mm_hash: str, lora: str | None) -> str:
        return mm_hash if lora is None else f"{lora}:{mm_hash}"


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the marking of contents in these two classes."""
    for kind, name in ((Inputs, "get_mm_hashes"), (Processor, "_get_mm_identifier")):
        monkeypatch.setattr(kind, name, getattr(kind, name))
    owners = {media._INPUTS: Inputs, media._PROCESSOR: Processor}
    monkeypatch.setattr(media, "_owner_of", lambda where: owners[where])
    mark_contents()
    mark_contents()  # a second call does nothing


def identifiers(
    items: list[Any], uuids: list[str | None] | None, lora: str | None = None
) -> list[str]:
    hashes = Inputs(items, uuids).get_mm_hashes("m")["image"]
    return [Processor()._get_mm_identifier(digest, lora) for digest in hashes]


def test_content_hashes_are_marked_and_client_names_are_not(marked: None) -> None:
    assert identifiers(["a", "b"], [None, "cat"]) == [f"{MARK}ma", "cat"]
    assert identifiers(["a"], None) == [f"{MARK}ma"]
    assert identifiers(["a"], [None], lora="x") == [f"x:{MARK}ma"]


@pytest.mark.parametrize("name", [MARK + "ma", f"x:{MARK}ma", MARK + MARK + "ma"])
def test_clients_cannot_forge_the_mark(marked: None, name: str) -> None:
    for lora in (None, "x"):
        (identifier,) = identifiers(["a"], [name], lora)
        assert MARK not in identifier
        made = Processor()._get_mm_identifier(name, lora)  # with the types of a client's tokens
        assert MARK not in made


def test_a_marked_hash_is_plain_text_for_other_code() -> None:
    assert ContentHash("a") == "a" and hash(ContentHash("a")) == hash("a")


def test_a_vllm_without_these_functions_shares_no_media(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "_owner_of", lambda where: None)
    mark_contents()
    made = request("r", TOKENS, images=[(NAME, 5)])
    assert private_from(made, BLOCK_TOKENS) == 1


def lookups() -> Lookups:
    """Make the lookups of an engine process."""
    connection: Any = SimpleNamespace()
    made = Lookups(
        connection, ConnectorCounters(), block_size=BLOCK_TOKENS, logger=logging.getLogger("t")
    )
    made.ranks = (Namespace.of("rank"),)
    return made


@pytest.mark.parametrize(
    ("images", "shared"),
    [
        ([], 6),
        ([(CONTENT, 9)], 6),
        ([(NAME, 9)], 2),
        ([(CONTENT, 2), (NAME, 12)], 3),
        ([(NAME, 0), (CONTENT, 12)], 0),
        ([("", 4)], 1),
        ([(f"x:{CONTENT}", 9)], 6),  # with an adapter's name before it
        ([(f"{MARK}x:cat", 9)], 2),  # an adapter whose name has the mark
    ],
)
def test_blocks_after_the_first_client_name_are_private_to_the_process(
    images: list[tuple[str, int]], shared: int
) -> None:
    own, other = lookups(), lookups()
    made = request("r", TOKENS, images=images)
    first, second = own.digests(made, 0, 6), other.digests(made, 0, 6)
    assert first[:shared] == second[:shared]
    assert not set(first[shared:]) & set(second[shared:])
    assert first == own.digests(request("s", TOKENS, images=images), 0, 6)
    for start in range(6):  # each part like the whole
        assert own.digests(made, start, 6) == first[start:]


def test_a_private_block_has_another_hash_after_a_reset() -> None:
    own, made = lookups(), request("r", TOKENS, images=[(NAME, 0)])
    before = own.digests(made, 0, 6)
    own.reset()
    assert not set(before) & set(own.digests(made, 0, 6))
