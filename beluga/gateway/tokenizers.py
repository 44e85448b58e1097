# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The tokenizers of the models: the configured one for all, or those of the engines.

KV events contain token ids, so a prompt's text matches no announced block. Without ``--tokenizer``
the gateway uses, for each engine that it follows, the model's folder that the engine reports in
``/v1/models``, if it can be read here, or else the engine's ``/tokenize``. Either is compared with
the engine once after each of its starts.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import aiohttp
import msgspec

from beluga.errors import RouterError
from beluga.gateway.conversation import ChatFields, Tokenizer, load_tokenizer, of_chat
from beluga.gateway.engine import Engine, Health
from beluga.gateway.fleet import Fleet
from beluga.gateway.parsed_request import SLOW_SIZE, TOKENIZED_SIZE_MAX, in_prompt_thread
from beluga.gateway.protocol import FAILURES, read_whole, words_of
from beluga.gateway.settings import Limits
from beluga.limit import LogLimit

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

ANSWER_S = 1.0  # an engine's time to tokenize a prompt; afterwards it is hashed as text
PAUSE_S = 10.0  # without such calls, after one that failed
_TEXT = "A whale sleeps for 12 minutes, und träumt vom Meer."
_MESSAGES = [{"role": "user", "content": _TEXT}]
_PROMPT = ("model", "prompt", "add_special_tokens")
_CHAT = (
    *("model", "messages", "tools", "add_generation_prompt", "continue_final_message"),
    *("add_special_tokens", "chat_template", "chat_template_kwargs"),
)
# The fields of a chat that change the prompt, and that vLLM's /tokenize does not have
_UNKNOWN = ("documents", "reasoning_effort", "mm_processor_kwargs")
_MISSING = (
    "there is no tokenizer for its prompts, so they are hashed by their text, which KV events do "
    "not contain: text prompts match no announced block. It has no /tokenize, and its model's "
    "folder cannot be read here; give the folder with --tokenizer"
)


class _Answer(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]] | None = None


_NONE = object()


class Tokenizers:
    """The tokenizer of each engine: ``given`` for all, or their own for those that ``follows``
    returns. A request may bring its own chat template if it is ``trusted``.
    """

    def __init__(  # noqa: PLR0913  keyword-only but the first four
        self,
        client: aiohttp.ClientSession,
        fleet: Fleet,
        limits: Limits,
        given: Tokenizer | None,
        *,
        follows: Callable[[Engine], bool],
        trusted: bool = False,
    ) -> None:
        self._client, self._fleet, self._given = client, fleet, given
        self._follows, self._trusted = follows, trusted
        self._timeout = aiohttp.ClientTimeout(total=limits.health_timeout_s)
        self._answer = aiohttp.ClientTimeout(total=ANSWER_S)
        self._own: dict[int, Tokenizer | None] = {}  # by worker; None: its /tokenize
        self._paused_until_s = 0.0
        self._limit = LogLimit()
        fleet.on_change(joined=lambda _: None, left=self._leave)

    def _leave(self, engine: Engine) -> None:
        self._own.pop(engine.worker.worker_id, None)

    @property
    def loaded(self) -> bool:
        """Whether prompts may be tokenized in this process."""
        return self._given is not None or any(own is not None for own in self._own.values())

    def of(self, model: str | None) -> Tokenizer | None:
        """Return the tokenizer of a model, if this process has it. Thread-safe."""
        if self._given is not None or not self._own:
            return self._given
        own = (self._own.get(engine.worker.worker_id) for engine in self._fleet.serving(model))
        return next((tokenizer for tokenizer in own if tokenizer is not None), None)

    async def by_engine(self, path: str, model: str | None, body: bytes) -> list[int] | None:
        """Return the tokens that an engine's ``/tokenize`` has for a request, or None."""
        if len(body) > TOKENIZED_SIZE_MAX or time.monotonic() < self._paused_until_s:
            return None
        engines = [
            engine
            for engine in self._fleet.serving(model)
            if engine.health is Health.UP and self._own.get(engine.worker.worker_id, _NONE) is None
        ]
        if not engines:
            return None
        make = partial(tokenize_fields, path, body)
        fields = await in_prompt_thread(make) if len(body) > SLOW_SIZE else make()
        if fields is None:
            return None
        engine = min(engines, key=lambda engine: engine.inflight)
        try:
            return await self._request_tokens(engine, self._answer, fields)
        except FAILURES as error:
            self._paused_until_s = time.monotonic() + PAUSE_S
            if self._limit.passes(engine.worker.worker_id, "tokenize") is not None:
                log.warning("%s does not tokenize prompts: %s", engine.url, words_of(error))
            return None

    async def look(self, engine: Engine) -> None:
        """Compare an engine's tokens, once after each of its starts, and store how they differ in
        its ``token_problems``. An engine that does not respond is probed again after its next
        check; one without ``/tokenize`` is not compared.
        """
        if engine.probed_after == engine.failures:
            return
        failures = engine.failures
        try:
            engine.token_problems = await self._problems(engine)
        except FAILURES as error:
            log.debug("%s does not return its tokens: %s", engine.url, words_of(error))
        else:
            engine.probed_after = failures

    async def _problems(self, engine: Engine) -> dict[str, str]:
        if self._given is not None:
            return await self._differences(engine, self._given)
        if not self._follows(engine):
            return {}
        number = engine.worker.worker_id
        self._own.pop(number, None)
        root = _root(engine)
        tokenizer = await self._load(root)
        if tokenizer is not None and await self._differences(engine, tokenizer):
            tokenizer = None
        own = tokenizer is not None and not tokenizer.problem
        if not own and await self._tokens(engine, prompt=_TEXT) is not None:
            self._own[number] = None
            log.info("%s: prompts are tokenized by its /tokenize", engine.url)
            return {}
        if tokenizer is None:
            return {"tokenizer": _MISSING}
        self._own[number] = tokenizer
        log.info("%s: prompts are tokenized as by %s", engine.url, root)
        return {"template": tokenizer.problem} if tokenizer.problem else {}

    async def _load(self, root: str) -> Tokenizer | None:
        """Load the tokenizer of a model, by its folder or its name in the cache of ``transformers``
        on this machine.
        """
        if not root:
            return None
        try:
            return await in_prompt_thread(
                partial(load_tokenizer, Path(root), trusted=self._trusted, is_model=True)
            )
        except RouterError as error:
            log.info("%s", error)
            return None

    async def _differences(self, engine: Engine, tokenizer: Tokenizer) -> dict[str, str]:
        theirs = await self._tokens(engine, prompt=_TEXT)
        if theirs is not None and theirs != tokenizer.text(_TEXT):
            return {
                "tokenizer": (
                    "it computes other tokens for a text than --tokenizer, so no prompt hits its "
                    "cache; give its model's folder"
                )
            }
        theirs = await self._tokens(engine, messages=_MESSAGES)
        if theirs is not None and not tokenizer.problem and theirs != _chat(tokenizer):
            return {
                "template": (
                    "it computes other tokens for a conversation than the chat template here, so "
                    "no conversation hits its cache; give its template with --chat-template"
                )
            }
        return {}

    async def _tokens(self, engine: Engine, **fields: Any) -> list[int] | None:
        body = {"model": engine.models[0] if engine.models else None, **fields}
        return await self._request_tokens(engine, self._timeout, body)

    async def _request_tokens(
        self, engine: Engine, timeout: aiohttp.ClientTimeout, fields: dict[str, Any]
    ) -> list[int] | None:
        """Return the engine's tokens, or None if it does not return them. Raises one of
        :data:`FAILURES`.
        """
        async with self._client.post(
            f"{engine.url}/tokenize", json=fields, timeout=timeout
        ) as answer:
            body = await read_whole(answer)
            if answer.status != 200:
                return None
        answered = msgspec.json.decode(body)
        try:
            return msgspec.convert(answered, _Answer).tokens
        except msgspec.ValidationError:
            return None


def _root(engine: Engine) -> str:
    """Return what the engine reports as its model, which is not an adapter: a folder or a name."""
    roots = (card.get("root") for card in engine.cards if not card.get("parent"))
    return next((root for root in roots if isinstance(root, str)), "")


def _chat(tokenizer: Tokenizer) -> list[int] | None:
    try:
        return tokenizer.chat(of_chat(ChatFields(), _MESSAGES))
    except ValueError:
        return None


def tokenize_fields(path: str, body: bytes) -> dict[str, Any] | None:
    """Return a request for ``/tokenize`` with the prompt of a request for ``path``, or None if
    ``/tokenize`` would not compute the same tokens: it renders completions of one text, and chats
    of texts and calls.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return None
    if path.endswith("/chat/completions"):
        messages = fields.get("messages")
        if any(fields.get(name) is not None for name in _UNKNOWN) or not _is_text(messages):
            return None
        return {name: fields[name] for name in _CHAT if fields.get(name) is not None}
    if path.endswith("/completions") and isinstance(fields.get("prompt"), str):
        return {name: fields[name] for name in _PROMPT if fields.get(name) is not None}
    return None


def _is_text(messages: Any) -> bool:
    if not isinstance(messages, list):
        return False
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, str) and (
                not isinstance(part, dict) or part.get("type") != "text"
            ):
                return False
    return True
