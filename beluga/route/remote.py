# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Prompts that other engines prefill first: by a rule, through a queue for each model.

The request goes to its decode engine when its KV lies in the pool, or when that has not come about
in time: then that engine prefills, as it would without any of this.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from beluga.disagg import Prefiller, PrefillTask, QueueSize, open_queue
from beluga.route.ask import Ask
from beluga.route.meter import Meter
from beluga.route.settings import Prefill
from beluga.router import Choice, Decision, Prompt

_PATHS = ("/v1/completions", "/v1/chat/completions")


class Remote:
    """The prefill queues of a router, by model."""

    def __init__(self, prefillers: Mapping[str, Prefiller], meter: Meter) -> None:
        self._prefillers = prefillers
        self._meter = meter

    @classmethod
    async def open(cls, settings: Prefill, meter: Meter) -> Remote:
        """Reach the queues. Raises RouterError for an unknown rule, QueueError."""
        decision = Decision(settings.rule)

        def decide(tokens: int, cached: int, size: QueueSize) -> bool:
            return decision.remote(Prompt(tokens=tokens, cached=cached, queue_size=size.waiting))

        prefillers: dict[str, Prefiller] = {}
        remote = cls(prefillers, meter)
        try:
            for model, url in settings.queues:
                queue = await open_queue(url, model)
                prefillers[model] = Prefiller(queue, decide, timeout_s=settings.wait_s)
        except BaseException:
            await remote.close()
            raise
        return remote

    async def prefill(self, ask: Ask, choice: Choice) -> None:
        """Have a prompt prefilled, if its model has a queue and the rule says so; wait for it."""
        prefiller = self._prefillers.get(ask.model or "")
        if prefiller is None or ask.path not in _PATHS or not ask.body:
            return
        course = await prefiller.prefill(
            lambda deadline: PrefillTask(
                request_id=uuid.uuid4().hex,
                model=ask.model or "",
                body=ask.body,
                path=ask.path,
                deadline=deadline,
            ),
            prompt_tokens=ask.isl,
            cached_tokens=int(choice.hit_rate * ask.isl),
        )
        self._meter.prefilled(ask, course.value)

    async def close(self) -> None:
        """Let go of the queues."""
        for prefiller in self._prefillers.values():
            await prefiller.close()
