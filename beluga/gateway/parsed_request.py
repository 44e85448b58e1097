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
"""How many bytes a request may have whose prompt is tokenized. More are longer than any model's
context, and would keep the request for minutes before an engine can refuse it.
"""
SLOW_SIZE = 1 << 17
"""From how many bytes on a body is parsed and hashed in a thread. Other requests do not wait. Less
takes 0.2 ms, and the way to a thread and back would cost more.
"""
FILE_TOKENS = 1024
"""How many tokens an image, sound or file in a prompt counts as, however many bytes it has. Common
models make 85 to 1,600 tokens of an image.
"""

Tokens = NDArray[np.uint32]
_MESSAGES = "/v1/messages"
# Bodies are untrusted, and a search holds up all other requests. So each of these searches looks
# at few bytes, and a long body is searched piece by piece.
_FORM_MODEL_NAME = b'; name="model"\r\n'
_FORM_MODEL = re.compile(rb"(?:[^\r\n]{1,256}\r\n){0,8}\r\n([^\r\n]{0,1024})\r\n--")
_FORM_MODELS_MAX = 16  # how many parts of this name are looked at
_FILE = re.compile(rb'"(?:url|data|image_url|file_data)"\s{0,16}:\s{0,16}"[^"]{256}')
_FILE_SIZE_MIN = 4096  # bytes, with the field's name; shorter texts count as they are
_MODEL = re.compile(rb'(?<!\\)"model"\s{0,16}:\s{0,16}"([^"\\]{1,1024})"')
_PIECE = 1 << 18  # bytes
_OVERLAP = 1 << 11  # bytes; no search finds more
_ODD_SIZE_MAX = 1 << 17
"""How many bytes of a body that only Python's decoder takes are decoded. Of a longer one only the
model's name is read.
"""
_EMPTY: Tokens = np.zeros(0, np.uint32)


class _Body(msgspec.Struct):
    """The fields that routing reads, of chat, completions, embeddings and similar requests. A field
    may have millions of values in it, so what need not be known is not decoded.
    """

    model: str | None = None
    stream: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()


@dataclasses.dataclass(slots=True)
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
    encoding: str = ""  # of a compressed body, whose model is not known
    response: str | None = None  # of /v1/responses: the one that it is about, or continues

    def drop_body(self) -> None:
        """Drop the body and the tokens, which an engine has now."""
        self.body, self.tokens = b"", _EMPTY


_decoder = msgspec.json.Decoder(_Body)
_chat_decoder = msgspec.json.Decoder(ChatFields)


def parse_request(
    path: str,
    body: bytes,
    *,
    tokenizer: Tokenizer | None = None,
    is_json: bool = True,
    encoding: str = "",
) -> ParsedRequest:
    """Parse a request. The engine judges everything in it, so its clients get its own errors: a
    request whose body is no JSON object with a model's name goes to any engine. A body with an
    ``encoding`` is not read.
    """
    if (response := response_of(path)) is not None:
        return ParsedRequest(path, body, odd=True, response=response)
    if encoding and body:
        return ParsedRequest(path, body, isl=len(body) // TEXT_TOKEN_SIZE, encoding=encoding)
    if not is_json or not body:
        return ParsedRequest(path, body, _form_model(body), len(body) // TEXT_TOKEN_SIZE)
    try:
        fields = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _odd(path, body)
    text = bytes(fields.messages) or bytes(fields.prompt) or bytes(fields.input)
    tokens = _tokens(path, body, fields, text, tokenizer)
    exact = tokens is not None
    tokens = text_tokens(_with_files_digested(text)) if tokens is None else tokens
    return ParsedRequest(
        *(path, body, fields.model or None, len(tokens), tokens, _string(fields.cache_salt)),
        stream=bytes(fields.stream) == b"true",
        exact=exact,
        response=_string(fields.previous_response_id) if path == _RESPONSES else None,
    )


def _string(raw: msgspec.Raw) -> str | None:
    """Return a field's value if it is a string."""
    text = bytes(raw)
    return msgspec.json.decode(text, type=str) if text.startswith(b'"') else None


def _odd(path: str, body: bytes) -> ParsedRequest:
    """Parse a body as Python's engines do. They take more than JSON: NaN, and half of a surrogate
    pair, which JavaScript makes of a string that is cut in an emoji.
    """
    model: object = None
    if len(body) > _ODD_SIZE_MAX:
        found = _search(_MODEL, body, 0)
        model = None if found is None else found[1].decode(errors="replace")
    else:
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            fields = None
        model = fields.get("model") if isinstance(fields, dict) else None
    known = model if isinstance(model, str) else None
    isl = len(body) // TEXT_TOKEN_SIZE
    return ParsedRequest(path, body, known, isl, odd=known is None)


def _search(pattern: re.Pattern[bytes], text: bytes, start: int) -> re.Match[bytes] | None:
    """Search a text piece by piece; other threads may run between two of them. The pattern matches
    at most :data:`_OVERLAP` bytes.
    """
    while start < len(text):
        if (found := pattern.search(text, start, start + _PIECE)) is not None:
            return found
        start += _PIECE - _OVERLAP
    return None


def _form_model(body: bytes) -> str | None:
    """Return the model that a form names, as those with a sound file do."""
    at = 0
    for _ in range(_FORM_MODELS_MAX):
        at = body.find(_FORM_MODEL_NAME, at)
        if at < 0:
            break
        at += len(_FORM_MODEL_NAME)
        if (found := _FORM_MODEL.match(body, at)) is not None:
            return found[1].decode(errors="replace")
    return None


def _tokens(
    path: str, body: bytes, fields: _Body, text: bytes, tokenizer: Tokenizer | None
) -> Tokens | None:
    """Return the tokens that an engine has of a prompt, or None if they cannot be known."""
    if not text or len(body) > TOKENIZED_SIZE_MAX:
        return None
    ids = None if fields.messages else _ids(text)
    if ids is not None:
        return ids
    if tokenizer is not None:
        try:
            return np.asarray(_tokenized(path, body, fields, text, tokenizer), np.uint32)
        except Exception as error:  # also the packages' own, of any type
            # The engine will refuse or understand an odd request; routing falls back to its text.
            log.debug("a prompt is hashed as text: %s", error)
    return None


def _with_files_digested(text: bytes) -> bytes:
    """Return a prompt's text with a digest for each file that it has inside, of the bytes that
    :data:`FILE_TOKENS` have: their base64 is no measure of the engine's work.
    """
    if text.startswith(b'"'):  # one string, which has no fields
        return text
    pieces: list[bytes] = []
    copied = at = 0
    while (found := _search(_FILE, text, at)) is not None:
        end = text.find(b'"', found.end()) + 1
        if not end:
            break
        at = end
        if end - found.start() > _FILE_SIZE_MIN:
            hashed = hashlib.blake2b(text[found.start() : end], digest_size=64).digest()
            digest = hashed * (FILE_TOKENS * TEXT_TOKEN_SIZE // len(hashed))
            pieces += text[copied : found.start()], digest
            copied = end
    return b"".join((*pieces, text[copied:])) if pieces else text


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


def _tokenized(
    path: str, body: bytes, fields: _Body, text: bytes, tokenizer: Tokenizer
) -> list[int]:
    if path == _MESSAGES:
        raise ValueError("conversations in Anthropic's form are not templated")
    said, beside = msgspec.json.decode(text), _chat_decoder.decode(body)
    if fields.messages:
        return tokenizer.chat(of_chat(beside, said))
    if path == _RESPONSES:
        return tokenizer.chat(of_responses(beside, said))
    special = beside.add_special_tokens is not False
    parts = said if isinstance(said, list) else [said]
    return [token for part in parts for token in tokenizer.text(part, special_tokens=special)]
