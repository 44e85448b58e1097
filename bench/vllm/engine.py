# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A vLLM engine in its own process: it reads commands on standard input and replies on standard
output.

Each line is a JSON object. The first argument holds the keyword arguments of ``vllm.LLM``. The
first reply, once the engine is ready, is ``{"ready": true}``. ``process.py`` is the other end.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ..harness.machine import cache_bytes
from .stream import Reply, stream

_SLEEP_S = 0.001  # as EngineCoreProc of vLLM 0.32 does


def main() -> None:
    """Execute commands until standard input ends, which also happens when the parent ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM's prints belong in the log

    def reply(message: Reply) -> None:
        replies.write(json.dumps(message) + "\n")

    from vllm import LLM

    _override_kernels()
    options = json.loads(sys.argv[1])
    connector = options.get("kv_transfer_config") or {}
    llm = LLM(**options)
    _sleep_as_in_a_process(llm.llm_engine.engine_core.engine_core)
    engine = Engine(llm, connector.get("kv_connector_module_path"))
    reply({"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            reply(engine.commands[command.pop("do")](**command))
        except Exception as error:
            reply({"error": f"{type(error).__name__}: {error}"})
    engine.end()


class Engine:
    """The commands of a running ``vllm.LLM``."""

    def __init__(self, llm: Any, connector: str | None) -> None:
        self._llm = llm
        self._connector = connector
        self._other = np.ones(4 * cache_bytes(), np.uint8)
        self.commands: dict[str, Callable[..., Reply]] = {
            "generate": self.generate,
            "stream": self.stream,
            "interrupt": self.interrupt,
            "figures": lambda: {"figures": self.figures()},
            "settle": self.settle,
            "reset": self.reset,
            "idle": self.idle,
            "flush": self.flush,
        }

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 8,
        salt: str | None = None,
        adapter: str | None = None,
    ) -> Reply:
        """Run prompts of token ids at once, greedily, with the LoRA adapter of a folder if there
        is one. For each prompt ``outputs`` has its tokens, the logprobs of the candidates for its
        first token, how many tokens were cached, and the seconds to the first token. ``figures``
        has the connector's counts during the call.
        """
        inputs: list[dict[str, Any]] = [{"prompt_token_ids": tokens} for tokens in prompts]
        for prompt in inputs if salt else []:
            prompt["cache_salt"] = salt
        before = self.figures()
        started = time.perf_counter()
        results = self._llm.generate(
            inputs,
            _sampling(max_tokens, logprobs=5),
            use_tqdm=False,
            lora_request=_adapter(adapter),
        )
        elapsed_s = time.perf_counter() - started
        return {
            "outputs": [_output(result) for result in results],
            "elapsed_s": elapsed_s,
            "figures": self._since(before),
        }

    def stream(
        self,
        prompts: list[list[int]],
        due_s: list[float] | None = None,
        at_once: int = 1,
        max_tokens: int | list[int] = 8,
    ) -> Reply:
        """Run prompts as they arrive: each ``due_s`` after the first, or always ``at_once`` of
        them. ``max_tokens`` is for all, or for each.

        For each prompt ``outputs`` has its tokens, how many were cached, and the seconds to the
        first token and between two tokens. ``figures`` has the connector's counts during the call.
        """
        before = self.figures()
        counts = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        samplings = [_sampling(count) for count in counts]
        reply = stream(self._llm.llm_engine, samplings, prompts, due_s, at_once)
        return reply | {"figures": self._since(before)}

    def interrupt(
        self, prompts: list[list[int]], steps: int, how: str, max_tokens: int = 8
    ) -> Reply:
        """Start prompts at once and interrupt them after some steps: "abort" ends them, "reset"
        empties the engine's own prefix cache under them, and "reset_connector" resets the
        connector, too. For each prompt that continues ``tokens`` has its tokens. vLLM refuses to
        empty its cache while a connector has blocks of it; ``done`` is false then.
        """
        engine, before = self._llm.llm_engine, self.figures()
        names = [f"interrupted-{number}" for number in range(len(prompts))]
        for name, tokens in zip(names, prompts, strict=True):
            prompt = {"prompt_token_ids": tokens}
            engine.add_request(name, prompt, _sampling(max_tokens))
        for _ in range(steps):
            engine.step()
        done = True
        if how == "abort":
            engine.abort_request(names)
        else:
            try:
                self._llm.reset_prefix_cache(True, how == "reset_connector")
            except RuntimeError:
                done = False
        answers = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    answers[output.request_id] = list(output.outputs[0].token_ids)
        return {
            "done": done,
            "tokens": [answers.get(name, []) for name in names],
            "figures": self._since(before),
        }

    def figures(self) -> dict[str, float]:
        """Return the connector's counters since the start; they are empty if it has none."""
        if self._connector is None:
            return {}
        module = importlib.import_module(self._connector)
        figures = getattr(module, "figures", None)
        return {} if figures is None else dict(figures())

    def _since(self, before: dict[str, float]) -> dict[str, float]:
        return {name: value - before.get(name, 0) for name, value in self.figures().items()}

    def settle(self, weights: dict[str, float], value: float, within_s: float) -> Reply:
        """Wait until a weighted sum of the connector's counters reaches ``value``. Returns whether
        it does.
        """
        deadline = time.monotonic() + within_s
        while self._sum(weights) < value:
            if time.monotonic() > deadline:
                return {"settled": False}
            self.idle()
            time.sleep(0.002)
        return {"settled": True}

    def _sum(self, weights: dict[str, float]) -> float:
        figures = self.figures()
        return sum(weight * figures.get(name, 0) for name, weight in weights.items())

    def idle(self) -> Reply:
        """Run a step without requests, in which the engine releases what a finished save held."""
        with contextlib.suppress(IndexError):
            self._llm.llm_engine.step()
        return {}

    def reset(self) -> Reply:
        """Empty the engine's own prefix cache, but not the connector's pool."""
        return {"reset": bool(self._llm.reset_prefix_cache())}

    def flush(self) -> Reply:
        """Replace what the CPU's cache has, by reading more bytes than it holds. KV that a step
        has just written would otherwise be read faster than from memory.
        """
        self._other.max()
        return {}

    def end(self) -> None:
        """Shut the engine and its connector down in order."""
        self._llm.llm_engine.engine_core.shutdown()


def _override_kernels() -> None:
    """Make vLLM replace its Triton kernels now, and not again when its worker starts.

    vLLM searches all loaded modules and fails at objects of numba, which some connectors import. If
    engine and worker share a process, the connector is imported before the worker starts.
    """
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda _cls: None)


def _sleep_as_in_a_process(core: Any) -> None:
    """Make the engine's loop sleep where that of vLLM's own engine process does: after a step that
    computed nothing. Otherwise a request that waits for its cache would use a core that the cache
    needs.
    """
    step = core.step_fn

    def step_and_sleep() -> tuple[Any, bool]:
        outputs, executed = step()
        if not executed and core.scheduler.has_requests():
            time.sleep(_SLEEP_S)
        return outputs, executed

    core.step_fn = step_and_sleep


def _sampling(max_tokens: int, logprobs: int | None = None) -> Any:
    """Return parameters for the likeliest tokens, ``max_tokens`` of them."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        logprobs=logprobs,
        ignore_eos=True,
        detokenize=False,
    )


def _adapter(folder: str | None) -> Any:
    if folder is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(folder, 1 + zlib.crc32(folder.encode()), folder)


def _output(result: Any) -> Reply:
    completion = result.outputs[0]
    first = completion.logprobs[0]
    return {
        "ttft_s": result.metrics.first_token_latency,
        "cached_tokens": result.num_cached_tokens or 0,
        "tokens": list(completion.token_ids),
        "logprobs": {str(token): entry.logprob for token, entry in first.items()},
    }


if __name__ == "__main__":
    main()
