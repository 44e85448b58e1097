# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A parsed request: what routing needs to know of it, which is the model and the prompt's tokens.

Without a tokenizer a "token" is four bytes of the prompt's text, which is about right for English.
Equal beginnings still give equal blocks, which suffices for a router's own memory of where prompts
went. Such blocks cannot be compared with those that engines announce; for that the router needs the
engines' tokenizer, or requests with token ids.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from beluga.gateway.conversation import ChatFields, of_chat, of_responses
from beluga.gateway.responses import PATH as _RESPONSES
from beluga.gateway.responses import response_of
from beluga.gateway.tokenizer import Tokenizer

log = logging.getLogger(__name__)

TEXT_TOKEN_SIZE = 4
"""How many bytes of a prompt's text count as a token without a tokenizer."""
TOKENIZED_SIZE_MAX = 8 << 20
"""How many bytes of a prompt are tokenized. More are longer than any model's context, and would
keep the request for minutes before an engine can refuse it.
"""
FILE_TOKENS = 1024
"""How many tokens an image, sound or file in a prompt counts as, however many bytes it has. Common
models make 85 to 1,600 tokens of an image.
"""

Tokens = NDArray[np.uint32]
_MESSAGES = "/v1/messages"
_FORM_MODEL = re.compile(rb'; name="model"\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)\r\n--')
_FILE = re.compile(rb'"(?:url|data|image_url|file_data)"\s*:\s*"[^"]{4096,}"')
_EMPTY: Tokens = np.zeros(0, np.uint32)


class _Body(ChatFields):
    """The fields that routing reads, of chat, completions, embeddings and similar requests."""

    model: Any = None
    stream: Any = False
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    cache_salt: Any = None
    previous_response_id: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A client's request: what routing needs, and the body, which the engine gets unchanged."""

    path: str
    body: bytes
    model: str | None = None
    isl: int = 0  # tokens
    # empty if hashing is not worthwhile
    tokens: Tokens = dataclasses.field(default_factory=lambda: _EMPTY)
    salt: str | None = None
    stream: bool = False
    exact: bool = False  # whether the tokens are the engine's, not guessed from the text
    odd: bool = False  # the model is not known, and any engine may say what is wrong
    response: str | None = None  # of /v1/responses: the one that it is about, or continues


_decoder = msgspec.json.Decoder(_Body)


def parse_request(
    path: str, body: bytes, *, tokenizer: Tokenizer | None = None, is_json: bool = True
) -> ParsedRequest:
    """Parse a request. The engine judges everything in it, so its clients get its own errors: a
    request whose body is no JSON object with a model's name goes to any engine.
    """
    if (response := response_of(path)) is not None:
        return ParsedRequest(path, body, odd=True, response=response)
    if not is_json or not body:
        return ParsedRequest(path, body, _form_model(body), len(body) // TEXT_TOKEN_SIZE)
    try:
        fields = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _odd(path, body)
    if fields.model is not None and not isinstance(fields.model, str):
        return _odd(path, body)
    text = bytes(fields.messages) or bytes(fields.prompt) or bytes(fields.input)
    tokens = _tokens(path, fields, text, tokenizer)
    exact = tokens is not None
    tokens = text_tokens(_with_files_digested(text)) if tokens is None else tokens
    salt = fields.cache_salt if isinstance(fields.cache_salt, str) else None
    before = fields.previous_response_id if path == _RESPONSES else None
    return ParsedRequest(
        *(path, body, fields.model or None, len(tokens), tokens, salt),
        stream=fields.stream is True,
        exact=exact,
        response=before if isinstance(before, str) else None,
    )


def _odd(path: str, body: bytes) -> ParsedRequest:
    """Parse a body as Python's engines do. They take more than JSON: NaN, and half of a surrogate
    pair, which JavaScript makes of a string that is cut in an emoji.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        fields = None
    model = fields.get("model") if isinstance(fields, dict) else None
    known = isinstance(model, str)
    isl = len(body) // TEXT_TOKEN_SIZE
    return ParsedRequest(path, body, model if known else None, isl, odd=not known)


def _form_model(body: bytes) -> str | None:
    """Return the model that a form names, as those with a sound file do."""
    found = _FORM_MODEL.search(body)
    return found[1].decode(errors="replace") if found else None


def _tokens(path: str, fields: _Body, text: bytes, tokenizer: Tokenizer | None) -> Tokens | None:
    """Return the tokens that an engine has of a prompt, or None if they cannot be known."""
    ids = None if fields.messages else _ids(text)
    if ids is not None:
        return ids
    if tokenizer is not None and 0 < len(text) <= TOKENIZED_SIZE_MAX:
        try:
            return np.asarray(_tokenized(path, fields, text, tokenizer), np.uint32)
        except Exception as error:  # also the packages' own, of any type
            # The engine will refuse or understand an odd request; routing falls back to its text.
            log.debug("a prompt is hashed as text: %s", error)
    return None


def _with_files_digested(text: bytes) -> bytes:
    """Return a prompt's text with a digest for each file that it has inside, of the bytes that
    :data:`FILE_TOKENS` have: their base64 is no measure of the engine's work.
    """

    def digest(found: re.Match[bytes]) -> bytes:
        hashed = hashlib.blake2b(found[0], digest_size=64).digest()
        return hashed * (FILE_TOKENS * TEXT_TOKEN_SIZE // len(hashed))

    return _FILE.sub(digest, text)


def text_tokens(text: bytes) -> Tokens:
    """Return one token for every four bytes, of shape (len(text) // 4,). The rest is dropped."""
    return np.frombuffer(text, "<u4", len(text) // TEXT_TOKEN_SIZE)


def _ids(text: bytes) -> Tokens | None:
    """Return the token ids of a prompt that is a list of ids or of such lists; otherwise None."""
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


def _tokenized(path: str, fields: _Body, text: bytes, tokenizer: Tokenizer) -> list[int]:
    said = msgspec.json.decode(text)
    if path == _MESSAGES:
        raise ValueError("conversations in Anthropic's form are not templated")
    if fields.messages:
        return tokenizer.chat(of_chat(fields, said))
    if path == _RESPONSES:
        return tokenizer.chat(of_responses(fields, said))
    special = fields.add_special_tokens is not False
    parts = said if isinstance(said, list) else [said]
    return [token for part in parts for token in tokenizer.text(part, special_tokens=special)]
