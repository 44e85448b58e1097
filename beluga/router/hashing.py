# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Hashes of blocks as Dynamo computes them: a local hash of a block's content, and a sequence hash
of the block and all blocks before it.

There are two versions. In era A (2025) both are XXH3-64 with seed 1337, and the name of a LoRA
adapter is hashed after the tokens. In era B (current) the local hash's seed is the XXH3-64 of a
JSON salt, and sequences are chained with seed 0. Tokens are unsigned 32-bit integers,
little-endian; a partial last block is dropped. An engine's own hashes are opaque and never computed
here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

import numpy as np

from beluga._ffi import ffi, lib
from beluga.errors import EventError, RouterError
from beluga.router.policy import Query

if TYPE_CHECKING:
    from numpy.typing import NDArray


U64 = (1 << 64) - 1


def words(values: Iterable[int]) -> array[int]:
    """Convert hashes for C. Negative values are reinterpreted as unsigned 64 bits.

    Raises EventError for a value that is not a number.
    """
    if isinstance(values, array) and values.typecode == "Q":
        return values
    listed = values if isinstance(values, list | tuple) else list(values)
    try:
        return array("Q", listed)
    except (OverflowError, TypeError):
        pass
    try:
        return array("Q", [value & U64 for value in listed])
    except TypeError:
        raise EventError("a KV event has a hash that is not a number") from None


Tokens: TypeAlias = "Sequence[int] | NDArray[np.uint32]"
Era: TypeAlias = Literal["a", "b"]

SEED_A = 1337


def unsigned(value: int) -> int:
    """Reinterpret a signed 64-bit hash as unsigned."""
    return value & U64


def xxh3(data: bytes, seed: int = 0) -> int:
    """Return the XXH3-64 of the data."""
    return int(lib.bl_xxh3(ffi.from_buffer(data), len(data), seed))


def salt_seed(salt: str = "", lora_name: str = "") -> int:
    """Return the seed of local hashes in era B. Empty fields are left out of the JSON."""
    fields = {"salt": salt, "lora_name": lora_name}
    named = {name: value for name, value in fields.items() if value}
    text = json.dumps(named, separators=(",", ":"), ensure_ascii=False)
    return xxh3(text.encode())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockHasher:
    """Hashes the prompts of one model, adapter and tenant.

    Raises RouterError for an unknown era, or for a salt in era A, which has none.
    """

    BLOCK_SIZE_MAX: ClassVar[int] = 1 << 16
    """The largest number of tokens in an engine's block. Usual sizes are 16 to 1,024."""

    block_size: int  # tokens
    era: Era = "b"
    salt: str = ""
    lora_name: str = ""
    _seed: int = dataclasses.field(init=False, repr=False)
    _suffix: bytes = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.era not in ("a", "b"):
            raise RouterError(f"there is no hash era {self.era!r}; choose a or b")
        if self.block_size <= 0:
            raise RouterError(f"block_size is {self.block_size}, but must be at least 1")
        if self.era == "a" and self.salt:
            raise RouterError("hash era a does not support a salt; choose era b")
        seed, suffix = SEED_A, b""
        if self.era == "b":
            seed = salt_seed(self.salt, self.lora_name)
        elif self.lora_name:  # the width of the length is an assumption: 32 bits
            name = self.lora_name.encode()
            suffix = struct.pack("<I", len(name)) + name
        object.__setattr__(self, "_seed", seed)
        object.__setattr__(self, "_suffix", suffix)

    def local(
        self, tokens: Tokens, multimodal: Mapping[int, Sequence[int]] | None = None
    ) -> list[int]:
        """Return the local hash of every full block.

        ``multimodal`` maps a block's index to the 64-bit hashes of its images and other objects, in
        any order. Raises RouterError for tokens that are not 32-bit integers.
        """
        if not self._suffix and not multimodal:
            return self.packed(tokens).tolist()
        data = memoryview(_token_bytes(tokens))
        stride = 4 * self.block_size
        shown = multimodal or {}
        return [
            xxh3(
                b"".join((data[at : at + stride], _packed(shown.get(index, ())), self._suffix)),
                self._seed,
            )
            for index, at in enumerate(range(0, len(data) - stride + 1, stride))
        ]

    def packed(self, tokens: Tokens) -> array[int]:
        """Return the local hash of every full block as a uint64 array, without multimodal content.
        Raises RouterError for tokens that are not 32-bit integers.
        """
        if self._suffix:
            return array("Q", self.local(tokens, {}))
        data = _token_bytes(tokens)
        stride = 4 * self.block_size
        hashes = _zeros(len(data) // stride)
        lib.bl_hash_windows(
            ffi.from_buffer("uint8_t[]", data),
            stride,
            stride,
            self._seed,
            ffi.from_buffer("uint64_t[]", hashes),
            len(hashes),
        )
        return hashes

    def sequence(self, local: Sequence[int]) -> list[int]:
        """Return the sequence hash of every block, from the local hashes."""
        return self.chained(array("Q", local)).tolist()

    def chained(self, local: array[int]) -> array[int]:
        """Return the sequence hash of every block as a uint64 array."""
        hashes = _zeros(len(local))
        lib.bl_hash_chain(
            ffi.from_buffer("uint64_t[]", local),
            len(local),
            SEED_A if self.era == "a" else 0,
            ffi.from_buffer("uint64_t[]", hashes),
        )
        return hashes

    def query(self, tokens: Tokens) -> Query:
        """Return the query for a prompt, for a policy."""
        local = self.packed(tokens)
        return Query(len(tokens), self.block_size, local, self.chained(local))


def salt_of(keys: Sequence[object] | None, lora_name: str) -> str:
    """Return the salt among the extra keys of a prompt's first block, or "". Extra keys are those
    of vLLM's BlockStored: the adapter's name, images, the salt, and embeddings.
    """
    named = [key for key in _without_adapter(keys, lora_name) if isinstance(key, str)]
    return named[-1] if named else ""


def with_extra_keys(
    local: Sequence[int],
    extra_keys: Sequence[Sequence[object] | None] | None,
    *,
    salt: str = "",
    lora_name: str = "",
) -> list[int]:
    """Return the local hashes of blocks with these extra keys.

    ``local`` are hashes of the tokens that already include salt and adapter. A block with images or
    embeddings gets a hash that is the same everywhere, and that no prompt of tokens has.
    """
    hashes = list(local)
    for index, keys in enumerate(extra_keys or ()):
        more = [key for key in _without_adapter(keys, lora_name) if key != salt]
        if more:
            hashes[index] = _beyond_tokens(hashes[index], more)
    return hashes


def _without_adapter(keys: Sequence[object] | None, lora_name: str) -> Sequence[object]:
    if not keys:
        return ()
    return keys[1:] if lora_name and keys[0] == lora_name else keys


def _beyond_tokens(tokens_hash: int, keys: Sequence[object]) -> int:
    import msgspec

    digest = hashlib.blake2b(msgspec.msgpack.encode([tokens_hash, keys]), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _zeros(count: int) -> array[int]:
    return array("Q", (0,)) * count


def _token_bytes(tokens: Tokens) -> bytes | memoryview:
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.uint32 and tokens.size:
        return np.ascontiguousarray(tokens, "<u4").data.cast("B")
    try:
        wide = np.asarray(tokens, dtype=np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise RouterError(f"a prompt's tokens must be whole numbers of 32 bits: {error}") from None
    if wide.size and (wide.min() < 0 or wide.max() >> 32):
        raise RouterError("a prompt's tokens must be whole numbers of 32 bits, from 0 on")
    return wide.astype("<u4").tobytes()


def _packed(hashes: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *sorted(hashes))
