# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What a client asks for, as far as routing needs to know: the model, and the prompt's tokens.

Without a tokenizer a "token" is four bytes of the prompt's text, about what one is in English: the
same beginnings still give the same blocks, which is all that a router's own memory of where prompts
went needs. Such blocks cannot be compared with those that engines announce; for that the router
must have the engines' tokenizer, or be asked with token ids.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from beluga.gateway.answers import Refusal
from beluga.gateway.tokenizer import Tokenizer

TEXT_TOKEN_SIZE = 4
"""Bytes of a prompt's text that stand for a token where there is no tokenizer."""

Tokens = NDArray[np.uint32]
_EMPTY: Tokens = np.zeros(0, np.uint32)


class _Body(msgspec.Struct):
    """The fields of chat, completions, embeddings and the like that routing looks at."""

    model: Any = None
    stream: Any = False
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    cache_salt: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A client's request: what routing needs, and the body that the engine gets unchanged."""

    path: str
    body: bytes
    model: str | None = None
    isl: int = 0  # tokens
    tokens: Tokens = dataclasses.field(default_factory=lambda: _EMPTY)  # none: not worth hashing
    salt: str | None = None
    stream: bool = False


_decoder = msgspec.json.Decoder(_Body)


def read_ask(
    path: str, body: bytes, *, tokenizer: Tokenizer | None = None, is_json: bool = True
) -> ParsedRequest:
    """What a request's body asks for. Raises Refusal (400) if it is no JSON object, or if its model
    is no name; all else is for the engine to judge.
    """
    if not is_json or not body:
        return ParsedRequest(path, body, isl=len(body) // TEXT_TOKEN_SIZE)
    try:
        fields = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Refusal(400, f"the request's body is no JSON object: {error}") from None
    if fields.model is not None and not isinstance(fields.model, str):
        raise Refusal(400, "'model' is no string", param="model")
    text = bytes(fields.messages) or bytes(fields.prompt) or bytes(fields.input)
    tokens = _tokens(fields, text, tokenizer)
    salt = fields.cache_salt if isinstance(fields.cache_salt, str) else None
    return ParsedRequest(path, body, fields.model, len(tokens), tokens, salt, fields.stream is True)


def _tokens(fields: _Body, text: bytes, tokenizer: Tokenizer | None) -> Tokens:
    ids = None if fields.messages else _ids(text)
    if ids is not None:
        return ids
    if tokenizer is not None and text:
        try:
            return np.asarray(_tokenized(fields, text, tokenizer), np.uint32)
        except (ValueError, TypeError, KeyError, OverflowError):
            pass  # an odd request, which the engine will refuse or understand; text will do
    return text_tokens(text)


def text_tokens(text: bytes) -> Tokens:
    """Four bytes a token, the rest dropped: (len(text) // 4,)."""
    return np.frombuffer(text, "<u4", len(text) // TEXT_TOKEN_SIZE)


def _ids(text: bytes) -> Tokens | None:
    """The token ids of a prompt that is a list of them, or the first of several such lists."""
    if not text.startswith(b"["):
        return None
    try:
        prompt = msgspec.json.decode(text)
        if prompt and isinstance(prompt[0], list):
            prompt = [token for part in prompt for token in part]
        if not prompt or not all(type(token) is int for token in prompt):
            return None
        return np.asarray(prompt, np.uint32)
    except (msgspec.MsgspecError, OverflowError, TypeError):
        return None


def _tokenized(fields: _Body, text: bytes, tokenizer: Tokenizer) -> list[int]:
    if fields.messages:
        return tokenizer.chat(msgspec.json.decode(fields.messages))
    prompt = msgspec.json.decode(text)
    parts = prompt if isinstance(prompt, list) else [prompt]
    return [token for part in parts for token in tokenizer.text(part)]
