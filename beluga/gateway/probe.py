# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Probes each started engine: whether it computes the same tokens for a text and a conversation as
the gateway's tokenizer. If not, its KV events match no prompt.
"""

from __future__ import annotations

import logging
from typing import Any

import aiohttp
import msgspec

from beluga.gateway.conversation import ChatFields, of_chat
from beluga.gateway.engine import Engine
from beluga.gateway.health import FAILURES, read_whole, words_of
from beluga.gateway.settings import Limits
from beluga.gateway.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_TEXT = "A whale sleeps for 12 minutes, und träumt vom Meer."
_MESSAGES = [{"role": "user", "content": _TEXT}]


class Probe:
    """Calls an engine's ``/tokenize`` once after each start. An engine without it is not
    checked.
    """

    def __init__(self, client: aiohttp.ClientSession, tokenizer: Tokenizer, limits: Limits) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._timeout = aiohttp.ClientTimeout(total=limits.health_timeout_s)

    async def run(self, engine: Engine) -> None:
        """Store how an engine's tokens differ in its ``token_problems``. An engine that does not
        respond is probed again after its next check.
        """
        if engine.probed_after == engine.failures:
            return
        failures = engine.failures
        try:
            engine.token_problems = await self._differences(engine)
        except FAILURES as error:
            log.debug("%s does not return its tokens: %s", engine.url, words_of(error))
        else:
            engine.probed_after = failures

    async def _differences(self, engine: Engine) -> dict[str, str]:
        theirs = await self._tokens(engine, prompt=_TEXT)
        if theirs is not None and theirs != self._tokenizer.text(_TEXT):
            return {
                "tokenizer": (
                    "it computes other tokens for a text than --tokenizer, so no prompt hits its "
                    "cache; give its model's folder"
                )
            }
        theirs = await self._tokens(engine, messages=_MESSAGES)
        if theirs is not None and not self._tokenizer.problem and theirs != self._chat():
            return {
                "template": (
                    "it computes other tokens for a conversation than the chat template here, so "
                    "no conversation hits its cache; give its template with --chat-template"
                )
            }
        return {}

    def _chat(self) -> list[int] | None:
        try:
            return self._tokenizer.chat(of_chat(ChatFields(), _MESSAGES))
        except ValueError:
            return None

    async def _tokens(self, engine: Engine, **fields: Any) -> list[int] | None:
        """Return the engine's tokens, or None if it does not return them."""
        body = {"model": engine.models[0] if engine.models else None, **fields}
        async with self._client.post(
            f"{engine.url}/tokenize", json=body, timeout=self._timeout
        ) as answer:
            answer_body = await read_whole(answer)
            if answer.status != 200:
                return None
        answered = msgspec.json.decode(answer_body)
        tokens = answered.get("tokens") if isinstance(answered, dict) else None
        return tokens if isinstance(tokens, list) else None
