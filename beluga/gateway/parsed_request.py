# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A parsed request: what routing needs, which is the model and the prompt's tokens.

Without a tokenizer, a "token" is four bytes of the prompt's text, which is about right for English:
of tools, instructions and the contents of messages, without the JSON around them.
Equal beginnings still give equal blocks, which is enough for a router's own record of earlier
prompts. Such blocks cannot be compared with those in KV events; that needs the engines' tokenizer,
or requests with token ids.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from beluga.gateway.conversation import ChatFields, Tokenizer, of_chat, of_responses

log = logging.getLogger(__name__)

TEXT_TOKEN_SIZE = 4
"""Bytes of a prompt's text that count as a token without a tokenizer."""
TOKENIZED_SIZE_MAX = 8 << 20
"""Largest size in bytes of a request whose prompt is tokenized. Larger prompts exceed any model's
context, and would take minutes before an engine can reject them.
"""
SLOW_SIZE = 1 << 16
"""Size in bytes from which a body is parsed and hashed on a thread, so that other requests do not
wait. Smaller ones take at most 0.5 ms, about as much as the handoff to a thread would cost.
"""
FILE_TOKENS = 1024
"""Tokens that an image, sound or file in a prompt counts as, whatever its size. Common models
convert an image to 85 to 1,600 tokens.
"""

Tokens = NDArray[np.uint32]
RESPONSES = "/v1/responses"
_OF_ONE_RESPONSE = re.compile(r"/v1/responses/([^/]+)(?:/.*)?")
_MESSAGES = "/v1/messages"
# Bodies are untrusted, and a search blocks all other requests. So each of these searches covers few
# bytes, and a long body is searched in pieces.
_FORM_MODEL_NAME = b'; name="model"\r\n'
_FORM_MODEL = re.compile(rb"(?:[^\r\n]{1,256}\r\n){0,8}\r\n([^\r\n]{0,1024})\r\n--")
_FORM_MODELS_MAX = 16  # inspected parts with this name
_COLON = re.compile(rb"\s*:\s*")
_FILES = frozenset((b"url", b"data", b"image_url", b"file_data"))
_FILE_SIZE_MIN = 4096  # bytes; shorter texts count by their length
# Fields that no template writes into a prompt, or only as a marker
_NO_TEXT = frozenset(
    b"type role id call_id tool_call_id status detail format media_type ttl signature "
    b"encrypted_content".split()
)
_STRINGS_MAX = 1 << 18  # inspected strings of a prompt; the remaining JSON counts as text
_MODEL = re.compile(rb'(?<!\\)"model"\s{0,16}:\s{0,16}"([^"\\]{1,1024})"')
_PIECE = 1 << 18  # bytes
_OVERLAP = 1 << 11  # bytes; no match is longer
_ODD_SIZE_MAX = 1 << 17
"""Largest size in bytes of a body that Python's decoder decodes if the fast decoder rejects it.
Only the model's name is read from larger ones.
"""
# A field that is not decoded with the others may be invalid, or nested too deeply, by itself.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_EMPTY: Tokens = np.zeros(0, np.uint32)


class _Body(msgspec.Struct):
    """The fields of chat, completion, embedding and similar requests that routing reads. A field
    may have millions of values, so the rest is not decoded.
    """

    model: str | None = None
    stream: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()


@dataclasses.dataclass(slots=True)
class ParsedRequest:
    """A client's request: what routing needs, and the body, which is forwarded unchanged."""

    path: str
    body: bytes
    model: str | None = None
    isl: int = 0  # tokens
    # Empty if hashing is not worthwhile.
    tokens: Tokens = dataclasses.field(default_factory=lambda: _EMPTY)
    salt: str | None = None
    stream: bool = False
    exact: bool = False  # whether the tokens are the engine's, not derived from the text
    odd: bool = False  # the model is unknown, and any engine may report the error
    encoding: str = ""  # of a compressed body, whose model is unknown
    response: str | None = None  # in /v1/responses: the one that it refers to or continues

    def take_tokens(self, tokens: list[int]) -> None:
        """Set the tokens that an engine has computed."""
        self.tokens, self.isl, self.exact = np.asarray(tokens, np.uint32), len(tokens), True

    def drop_body(self) -> None:
        """Drop the body and the tokens, once an engine has them."""
        self.body, self.tokens = b"", _EMPTY


_decoder = msgspec.json.Decoder(_Body)
_chat_decoder = msgspec.json.Decoder(ChatFields)


def parse_request(
    path: str,
    body: bytes,
    *,
    tokenizer_of: Callable[[str | None], Tokenizer | None] = lambda _: None,
    is_json: bool = True,
    encoding: str = "",
) -> ParsedRequest:
    """Parse a request. The engine validates it, so that clients get its own errors: a request whose
    body is not a JSON object with a model's name is sent to any engine. A body with an ``encoding``
    is not read. ``tokenizer_of`` returns the tokenizer of a model, if there is one.
    """
    if (response := response_of(path)) is not None:
        return ParsedRequest(path, body, odd=True, response=response)
    if encoding and body:
        return ParsedRequest(path, body, isl=len(body) // TEXT_TOKEN_SIZE, encoding=encoding)
    if not is_json or not body:
        isl = min(len(body) // TEXT_TOKEN_SIZE, FILE_TOKENS)  # almost all of a form is a file
        return ParsedRequest(path, body, _form_model(body), isl)
    try:
        fields = _decoder.decode(body)
    except _UNREADABLE:
        return _odd(path, body)
    text = bytes(fields.messages) or bytes(fields.prompt) or bytes(fields.input)
    tokens = _tokens(path, body, fields, text, tokenizer_of(fields.model))
    exact = tokens is not None
    if tokens is None:
        tools = bytes(fields.tools).removeprefix(b"null")  # which templates write first, as JSON
        parts = map(prompt_text, (bytes(fields.system), bytes(fields.instructions), text))
        tokens = text_tokens(b"".join((tools, *parts)))
    return ParsedRequest(
        *(path, body, fields.model or None, len(tokens), tokens, _string(fields.cache_salt)),
        stream=bytes(fields.stream) == b"true",
        exact=exact,
        response=_string(fields.previous_response_id) if path == RESPONSES else None,
    )


def response_of(path: str) -> str | None:
    """Return the response that a path refers to: ``/v1/responses/ID`` or ``ID/cancel``."""
    match = _OF_ONE_RESPONSE.fullmatch(path)
    return match[1] if match else None


def _string(raw: msgspec.Raw) -> str | None:
    """Return a field's value if it is a string that can be read."""
    text = bytes(raw)
    try:
        return msgspec.json.decode(text, type=str) if text.startswith(b'"') else None
    except _UNREADABLE:
        return None


def _odd(path: str, body: bytes) -> ParsedRequest:
    """Parse a body like Python's engines do. They accept more than JSON: NaN, and lone surrogates,
    which JavaScript produces when it truncates a string within an emoji.
    """
    model: object = None
    if len(body) > _ODD_SIZE_MAX:
        match = _search(_MODEL, body, 0)
        model = None if match is None else match[1].decode(errors="replace")
    else:
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            fields = None
        model = fields.get("model") if isinstance(fields, dict) else None
    known = model if isinstance(model, str) else None
    isl = len(prompt_text(body)) // TEXT_TOKEN_SIZE
    return ParsedRequest(path, body, known, isl, odd=known is None)


def _search(pattern: re.Pattern[bytes], text: bytes, start: int) -> re.Match[bytes] | None:
    """Search a text piece by piece; other threads may run in between. The pattern matches at most
    :data:`_OVERLAP` bytes.
    """
    while start < len(text):
        if (match := pattern.search(text, start, start + _PIECE)) is not None:
            return match
        start += _PIECE - _OVERLAP
    return None


def _form_model(body: bytes) -> str | None:
    """Return the model in a form, which requests with a sound file use."""
    at = 0
    for _ in range(_FORM_MODELS_MAX):
        at = body.find(_FORM_MODEL_NAME, at)
        if at < 0:
            break
        at += len(_FORM_MODEL_NAME)
        if (match := _FORM_MODEL.match(body, at)) is not None:
            return match[1].decode(errors="replace")
    return None


def _tokens(
    path: str, body: bytes, fields: _Body, text: bytes, tokenizer: Tokenizer | None
) -> Tokens | None:
    """Return the tokens that an engine computes for a prompt, or None if they are unknown."""
    if not text or len(body) > TOKENIZED_SIZE_MAX:
        return None
    ids = None if fields.messages else _ids(text)
    if ids is not None:
        return ids
    if tokenizer is not None:
        try:
            return np.asarray(_tokenized(path, body, fields, text, tokenizer), np.uint32)
        except Exception as error:  # includes errors of the libraries, of any type
            # The engine will reject or understand an odd request; routing falls back to its text.
            log.debug("a prompt is hashed as text: %s", error)
    return None


def prompt_text(text: bytes) -> bytes:
    """Return the strings in JSON that are a prompt's text, in UTF-8, one after the other.

    A file is a digest, repeated to the size of :data:`FILE_TOKENS`: the length of its base64
    encoding is unrelated to the engine's work.
    """
    plain = text  # without escaped quotes, so each quote begins or ends a string
    if b'\\"' in text:
        plain = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    pieces: list[bytes] = []
    key, value_at, end = b"", -1, -1
    for _ in range(_STRINGS_MAX):
        start = plain.find(b'"', end + 1)
        if start < 0:
            return b"".join(pieces)
        end = plain.find(b'"', start + 1)
        end = len(text) if end < 0 else end
        if (colon := _COLON.match(plain, end + 1)) is not None:
            key, value_at = text[start + 1 : end], colon.end()
        elif start != value_at:  # in a list
            pieces.append(_unescaped(text[start : end + 1]))
        elif key in _FILES and end - start > _FILE_SIZE_MIN:
            hashed = hashlib.blake2b(text[start:end], digest_size=64).digest()
            pieces.append(hashed * (FILE_TOKENS * TEXT_TOKEN_SIZE // len(hashed)))
        elif key not in _NO_TEXT:
            pieces.append(_unescaped(text[start : end + 1]))
    return b"".join((*pieces, text[end + 1 :]))


def _unescaped(quoted: bytes) -> bytes:
    """Return a JSON string's content in UTF-8. One that cannot be decoded is left as it is."""
    if b"\\" not in quoted:
        return quoted[1:-1]
    try:
        return msgspec.json.decode(quoted, type=str).encode()
    except _UNREADABLE:
        return quoted[1:-1]


def text_tokens(text: bytes) -> Tokens:
    """Return one token per four bytes, of shape (len(text) // 4,). The remainder is dropped."""
    return np.frombuffer(text, "<u4", len(text) // TEXT_TOKEN_SIZE)


def _ids(text: bytes) -> Tokens | None:
    """Return the token ids of a prompt that is a list of ids or a list of such lists; otherwise
    None.
    """
    if not text.startswith(b"["):
        return None
    try:
        prompt = msgspec.json.decode(text)
        if prompt and isinstance(prompt[0], list):
            prompt = [token for part in prompt for token in part]
        if not prompt or not all(type(token) is int for token in prompt):
            return None
        return np.asarray(prompt, np.uint32)
    except (*_UNREADABLE, OverflowError, TypeError):
        return None


def _tokenized(
    path: str, body: bytes, fields: _Body, text: bytes, tokenizer: Tokenizer
) -> list[int]:
    if path == _MESSAGES:
        raise ValueError("conversations in Anthropic's format are not supported")
    decoded, chat_fields = msgspec.json.decode(text), _chat_decoder.decode(body)
    if fields.messages:
        return tokenizer.chat(of_chat(chat_fields, decoded))
    if path == RESPONSES:
        return tokenizer.chat(of_responses(chat_fields, decoded))
    special = chat_fields.add_special_tokens is not False
    parts = decoded if isinstance(decoded, list) else [decoded]
    return [token for part in parts for token in tokenizer.text(part, special_tokens=special)]


T = TypeVar("T")

PROMPT_THREADS = 4
"""The threads that parse, tokenize and hash large prompts."""
# Not those of the event loop, which resolves engines' host names: a flood of large prompts would
# fail every health check.
_THREADS = ThreadPoolExecutor(PROMPT_THREADS, "beluga-prompt")


async def in_prompt_thread(call: Callable[[], T]) -> T:
    """Run ``call`` on one of these threads and return its result."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, call)
