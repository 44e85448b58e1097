# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Prompts that other engines prefill first: by a rule, through a queue for each model.

The request goes to its decode engine when its KV lies in the pool, or when that has not come about
in time: then that engine prefills, as it would without any of this.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping

from beluga.disagg import Prefiller, PrefillTask, QueueSize, open_queue
from beluga.errors import NoWorkersError
from beluga.gateway.metrics import Metrics
from beluga.gateway.parsed_request import ParsedRequest
from beluga.gateway.settings import Prefill
from beluga.router import Choice, Decision, Load, Prompt, Worker

_PATHS = ("/v1/completions", "/v1/chat/completions")


class Remote:
    """The prefill queues of a router, by model."""

    def __init__(
        self,
        prefillers: Mapping[str, Prefiller],
        decision: Decision,
        load_of: Callable[[Worker], Load],
        metrics: Metrics,
    ) -> None:
        self._prefillers = prefillers
        self._decision = decision
        self._load_of = load_of
        self._metrics = metrics

    @classmethod
    async def open(
        cls, settings: Prefill, load_of: Callable[[Worker], Load], metrics: Metrics
    ) -> Remote:
        """Reach the queues. ``load_of`` a decode engine raises NoWorkersError when that has left.

        Raises RouterError for an unknown rule, QueueError.
        """
        prefillers: dict[str, Prefiller] = {}
        remote = cls(prefillers, Decision(settings.rule), load_of, metrics)
        try:
            for model, url in settings.queues:
                queue = await open_queue(url, model)
                prefillers[model] = Prefiller(queue, timeout_s=settings.wait_s)
        except BaseException:
            await remote.close()
            raise
        return remote

    async def prefill(self, ask: ParsedRequest, choice: Choice) -> None:
        """Have a prompt prefilled, if its model has a queue and the rule says so; wait for it."""
        prefiller = self._prefillers.get(ask.model or "")
        if prefiller is None or ask.path not in _PATHS or not ask.body:
            return
        cached = int(choice.hit_rate * ask.isl)

        def decide(size: QueueSize, sent: int) -> bool:
            return self._decision.remote(
                Prompt(
                    tokens=ask.isl,
                    cached=cached,
                    queue_size=size.waiting,
                    prefill=_prefill_load(size, sent),
                    decode=self._decode_load(choice.worker),
                )
            )

        def task(deadline: float) -> PrefillTask:
            return PrefillTask(
                request_id=uuid.uuid4().hex,
                model=ask.model or "",
                body=ask.body,
                path=ask.path,
                deadline=deadline,
            )

        course = await prefiller.prefill(task, decide, tokens=ask.isl - cached)
        self._metrics.prefilled(ask, course.value)

    async def close(self) -> None:
        """Let go of the queues."""
        for prefiller in self._prefillers.values():
            await prefiller.close()

    def _decode_load(self, worker: Worker) -> Load | None:
        try:
            return self._load_of(worker)
        except NoWorkersError:  # it has left meanwhile
            return None


def _prefill_load(size: QueueSize, sent: int) -> Load:
    """Of the worker that would have a prompt. Which one that is shows when it takes the task, so:
    its share of what this router has sent, ``sent`` tokens, if each worker at work has one task.
    """
    return Load(active_prefill_tokens=sent // max(size.claimed, 1))
