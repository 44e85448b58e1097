# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Records the hooks that a real vLLM calls, with the data that our connector uses of them.

``python recording.py KIND OPTIONS FILE`` runs the scenarios of an engine of that kind. FILE gets
one JSON value per line. The first names the version of vLLM. Each further one is a call: its hook,
its arguments, what it returned, and the state of the requests as far as it changed since the last
line. Empty values are omitted, and a call that has nothing else is its hook's name alone.
``replaying.py`` calls the connector in the same order again.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
from typing import Any

import vllm
from siblings import FaultyConnector
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from beluga.connectors.vllm import figures
from beluga.connectors.vllm.connector import BelugaConnector

for name in ("RecordingConnector", "RecordedFaults"):
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, "recording", name)


class Record:
    """The file of this process's engine, and the requests that it has."""

    def __init__(self) -> None:
        path = os.environ["BELUGA_TEST_RECORD"]
        self._file = open(path, "w", buffering=1)  # noqa: PTH123, SIM115
        self._requests: dict[str, Any] = {}
        self._known: dict[str, dict[str, Any]] = {}
        self._names: dict[str, str] = {}
        self._manager: Any = None

    def begin(self, manager: Any, config: Any) -> None:
        """Write the first line."""
        self._manager = manager
        line = {"vllm": vllm.__version__, "blocks": config.num_blocks}
        self._write(line | {"block_tokens": config.hash_block_size})

    def name(self, request: str) -> str:
        """Return a short name, the same in each recording."""
        return self._names.setdefault(request, f"r{len(self._names)}")

    def names(self, requests: Any) -> list[str]:
        return sorted(map(self.name, requests or ()))

    def of(self, request: Any) -> str:
        self._requests.setdefault(request.request_id, request)
        return self.name(request.request_id)

    def call(self, hook: str, **fields: Any) -> None:
        fields["requests"] = self._states()
        full = {name: value for name, value in fields.items() if value not in ([], {})}
        self._write({"hook": hook} | full if full else hook)

    def _write(self, line: Any) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def forget(self, request: Any) -> None:
        self._requests.pop(request.request_id)

    def _states(self) -> dict[str, Any]:
        changed = {}
        for key, request in self._requests.items():
            state = {
                "computed": request.num_computed_tokens,
                "in_flight": request.num_in_flight_tokens,
                "nans": request.num_nans_in_logits,
                "tokens": request.num_tokens,
                "hashes": [digest.hex()[:16] for digest in request.block_hashes],
                "table": list(self._manager.get_block_ids(key)[0]),
            }
            before = self._known.get(key, {})
            new = {
                part: _change(before.get(part), value)
                for part, value in state.items()
                if before.get(part) != value
            }
            if new:
                changed[self.name(key)] = new
                self._known[key] = state
        return changed


def _change(before: Any, value: Any) -> Any:
    """Return a value, or only what a list got: the number of former items, and the new ones."""
    if before and isinstance(value, list) and value[: len(before)] == before:
        return {"after": len(before), "new": value[len(before) :]}
    return value


_record: list[Record] = []


def record() -> Record:
    if not _record:
        _record.append(Record())
    return _record[0]


class RecordingConnector(BelugaConnector):
    """Ours, with a record of its calls."""

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        record().begin(kv_cache_manager, self._kv_cache_config)
        super().bind_kv_cache_manager(kv_cache_manager)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        matched = super().get_num_new_matched_tokens(request, num_computed_tokens)
        record().call(
            "matched",
            request=record().of(request),
            tokens=num_computed_tokens,
            found=list(matched),
        )
        return matched

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        name, ids = record().of(request), list(blocks.get_block_ids()[0])
        record().call("allocated", request=name, blocks=ids, tokens=num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        record().call(
            "schedule",
            scheduled={
                record().name(request_id): tokens
                for request_id, tokens in scheduler_output.num_scheduled_tokens.items()
            },
            preempted=record().names(scheduler_output.preempted_req_ids),
        )
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        invalid = sorted(connector_output.invalid_block_ids)
        record().call("output", invalid=invalid)
        super().update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        name = record().of(request)
        held = super().request_finished(request, block_ids)
        record().call("finished", request=name, blocks=list(block_ids), held=held[0])
        record().forget(request)
        return held

    def reset_cache(self) -> bool:
        record().call("reset")
        return super().reset_cache()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        record().call("preempt")
        super().handle_preemptions(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        record().call("bind")
        super().bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        record().call("load")
        super().start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        record().call("save")
        super().wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        finished = super().get_finished(finished_req_ids)
        sent, loaded = (record().names(ids) for ids in finished)
        record().call(
            "ended", requests_ended=record().names(finished_req_ids), sent=sent, loaded=loaded
        )
        return finished

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed = super().get_block_ids_with_load_errors()
        record().call("errors", found=sorted(failed))
        return failed

    def build_connector_worker_meta(self) -> Any:
        record().call("report")
        return super().build_connector_worker_meta()


class RecordedFaults(FaultyConnector):
    """Another connector, with a record of what it writes into which blocks."""

    def _loaded(self, load: Any) -> set[int]:
        """Copy nothing: a replay uses another memory."""
        _, fault, blocks, names = load
        blocks_loaded = [
            [block, name[:16], index not in fault.bad]
            for index, (block, name) in enumerate(zip(blocks, names, strict=True))
        ]
        record().call("other", blocks=blocks_loaded)
        return {block for block, _, right in blocks_loaded if not right}


class Scenarios:
    """The commands to an engine. Its own cache is empty before each part."""

    def __init__(self, llm: Any, kind: str) -> None:
        self._llm, self._engine, self._several = llm, llm.llm_engine, kind.startswith("multi")
        self._seed = 0
        path = os.environ["BELUGA_TEST_FAULTS"]
        self._faults = open(path, "w", buffering=1)  # noqa: PTH123, SIM115

    def prompt(self, length: int) -> list[int]:
        self._seed += 1
        chance = random.Random(self._seed)
        return [chance.randrange(3, 2048) for _ in range(length)]

    def generate(
        self, *prompts: list[int], count: int = 4, faults: dict[int, Any] | None = None
    ) -> None:
        self.add(*prompts, count=count, faults=faults)
        self.settle()

    def add(
        self, *prompts: list[int], count: int = 4, faults: dict[int, Any] | None = None
    ) -> list[str]:
        from vllm import SamplingParams

        names = []
        for index, tokens in enumerate(prompts):
            self._faults.write(json.dumps((faults or {}).get(index)) + "\n")
            self._seed += 1
            parameters = SamplingParams(
                temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
            )
            name = f"request-{self._seed}"
            self._engine.add_request(name, {"prompt_token_ids": tokens}, parameters)
            names.append(name)
        return names

    def abort(self, name: str) -> None:
        """Abort a request. Its name is the one that it was added with, not vLLM's own."""
        before = self._engine.get_num_unfinished_requests()
        self._engine.abort_request([name])
        assert self._engine.get_num_unfinished_requests() == before - 1

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            with contextlib.suppress(IndexError):
                self._engine.step()

    def settle(self) -> None:
        """Run steps until everything is computed and saved."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        while scheduler.has_requests():
            self.step()
            time.sleep(0.002)

    def forget(self) -> None:
        self.settle()
        assert self._llm.reset_prefix_cache()

    def run(self) -> None:
        """Run everything."""
        shared = self.prompt(101)
        self.generate(shared + self.prompt(150), count=12)  # in chunks; answers fill blocks
        self.forget()
        self.generate(shared + self.prompt(70), count=1)  # a remote prefill after a partial hit
        self.generate(shared + self.prompt(33), shared + self.prompt(60))  # after a local hit
        self.forget()
        for _ in range(2):  # the second time they are hits
            prompts = [self.prompt(157) for _ in range(4)]
            self.generate(*prompts, count=8)  # too much for the engine: preemptions
            self.forget()
            self.generate(*prompts, count=3)
            self.forget()
        for steps in (1, 2, 4):
            request_id, *_ = self.add(self.prompt(300), self.prompt(40), count=8)
            self.step(steps)
            self.abort(request_id)
            self.settle()
        self.add(self.prompt(200), self.prompt(90), count=12)
        self.step(5)
        self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        self.settle()
        if self._several:
            self.forget()
            self._run_faults()

    def _run_faults(self) -> None:
        """Make the other connector fail in every way."""
        ways: list[dict[str, Any]] = [
            {"load": "sync"},
            *({"load": "async", "report": report} for report in ("early", "end", "request")),
        ]
        for way in ways:
            for bad in ([0], [1, 3], [0, 1, 2, 3]):
                tokens = self.prompt(150)
                fault = {"blocks": 4, "bad": bad} | way
                self.generate(tokens, count=3, faults={0: fault})
                self.generate(tokens, count=3)
                self.forget()
                sharers = [tokens[:128] + self.prompt(30) for _ in range(3)]
                self.generate(*sharers, count=3, faults={0: fault, 1: fault})
                self.forget()
                longer = self.prompt(170)
                request_id, *_ = self.add(longer, tokens[:96], count=3, faults={0: fault})
                self.step()
                self.abort(request_id)
                self.generate(longer, count=3)  # behind what the failed load has left there
                self.forget()


def main() -> None:
    """Record one engine."""
    kind, options, os.environ["BELUGA_TEST_RECORD"] = sys.argv[1:]
    from beluga_bench.vllm.engine import _override_kernels

    _override_kernels()
    llm = vllm.LLM(**json.loads(options))
    Scenarios(llm, kind).run()
    sys.modules["recording"].record().call("end", saved=figures()["save_blocks"])
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
