# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Remote prefill: other engines prefill prompts first, by a rule, through a queue per model.

The request is sent to its decode engine when its KV is in the pool, or when the prefill took too
long: no worker claimed it in the time that the decode engine would need, or the worker that claimed
it did not finish within ``Prefill.wait_s``. In that case the decode engine prefills, as it would
without this module.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping

from beluga.disagg import PATHS, Prefiller, PrefillTask, QueueSize, open_queue
from beluga.errors import NoWorkersError
from beluga.gateway.metrics import Metrics
from beluga.gateway.parsed_request import ParsedRequest
from beluga.gateway.settings import Prefill
from beluga.router import Choice, CostEstimator, Decision, Load, Prompt, Worker

log = logging.getLogger(__name__)


class Remote:
    """The prefill queues of a router, by model."""

    def __init__(
        self,
        prefillers: Mapping[str, Prefiller],
        decision: Decision,
        load_of: Callable[[Worker], Load],
        metrics: Metrics,
        estimator: CostEstimator,
    ) -> None:
        self._prefillers = prefillers
        self._decision = decision
        self._load_of = load_of
        self._estimator = estimator
        self._metrics = metrics

    @classmethod
    async def open(
        cls,
        settings: Prefill,
        decision: Decision,
        load_of: Callable[[Worker], Load],
        metrics: Metrics,
        estimator: CostEstimator,
    ) -> Remote:
        """Connect to the queues of the models for which ``decision`` decides. ``load_of`` raises
        NoWorkersError for a removed decode engine. ``estimator`` returns how long a decode engine
        prefills.

        Raises QueueError.
        """
        prefillers: dict[str, Prefiller] = {}
        remote = cls(prefillers, decision, load_of, metrics, estimator)
        try:
            for model, url in settings.queues:
                queue = await open_queue(url, model)
                prefillers[model] = Prefiller(queue, timeout_s=settings.wait_s)
        except BaseException:
            await remote.close()
            raise
        return remote

    async def prefill(self, parsed: ParsedRequest, choice: Choice) -> None:
        """Request the prefill of a prompt and wait for it, if its model has a queue and the rule
        allows it.
        """
        prefiller = self._prefillers.get(parsed.model or "")
        if prefiller is None or parsed.path not in PATHS or not parsed.body:
            return
        cached = int(choice.hit_rate * parsed.isl)

        def decide(size: QueueSize, sent: int) -> bool:
            prompt = Prompt(
                tokens=parsed.isl,
                cached=cached,
                queue_size=size.waiting,
                prefill=_prefill_load(size, sent),
                decode=self._decode_load(choice.worker),
            )
            is_remote = self._decision.remote(prompt)
            log.debug("%s: %s, %s", self._decision.name, "remote" if is_remote else "local", prompt)
            return is_remote

        def task(deadline: float) -> PrefillTask:
            return PrefillTask(
                request_id=uuid.uuid4().hex,
                model=parsed.model or "",
                body=parsed.body,
                path=parsed.path,
                deadline=deadline,
            )

        new = parsed.isl - cached
        local_s = self._estimator.alone_s(new, cached)
        course = await prefiller.prefill(task, decide, tokens=new, local_s=local_s)
        self._metrics.prefilled(parsed, course.value)

    async def close(self) -> None:
        """Close the queues."""
        for prefiller in self._prefillers.values():
            await prefiller.close()

    def _decode_load(self, worker: Worker) -> Load | None:
        try:
            return self._load_of(worker)
        except NoWorkersError:  # the worker was removed meanwhile
            return None


def _prefill_load(size: QueueSize, sent: int) -> Load:
    """Estimate the load of the worker that would get a prompt. It is not known which worker claims
    the task. So this is a worker's share of the ``sent`` tokens of this router, assuming one task
    per busy worker.
    """
    return Load(active_prefill_tokens=sent // max(size.claimed, 1))
