# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command ``scripts/vllm-bench``: the Beluga paper's experiments 5 to 8 with real engines, at a
smaller scale.

Long contexts with several questions each are sent to vLLM alone, to vLLM with our pool, and with
the pools of other projects, in turn: in two passes, then at several rates. Then block sizes are
varied, and a pool without interleaving is measured. The exit status is 1 if our second pass did not
hit all blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from ..harness.recorded import write_record
from .arm import Arm, Setting, beluga_arm, plain_arm
from .charts import draw
from .command import positive, progress, run_in_folder
from .dataset import Dataset, cut, datasets_of, pool_tokens, warm_up_of
from .load import Load
from .model import SIZES, model
from .peers import PEERS, PeerUnavailableError
from .report import Report, origin
from .station import Station
from .summary import Row
from .tables import print_tables
from .variants import VARIANTS, compare
from .verdict import verdict

_RESULTS = Path(__file__).resolve().parent.parent / "results"
_TIMEOUT_MS = 5000  # pauses of a busy machine must not turn hits into misses
_PYTHON = "BELUGA_VLLM_PYTHON"
_QUICK: dict[str, Any] = {
    "model": "tiny",
    "lengths": [1024, 2048],
    "contexts": 1,
    "answer": 4,
    "rates": [1.0, 4.0],
    "variants": ["blocks-32", "not-interleaved"],
    "repetitions": 1,
}
_USUAL: dict[str, Any] = {
    "model": "mid",
    "lengths": [2048, 4096, 8192, 15360],
    "contexts": 4,
    "answer": 16,
    "rates": [0.5, 1.0, 2.0, 4.0],
    "variants": list(VARIANTS),
    "repetitions": 3,
    "results": _RESULTS,
}


def measure(setting: Setting, options: argparse.Namespace) -> Report:
    """Run all measurements. Raises BelugaError if a process dies or fails."""
    load_average, started = os.getloadavg()[0], time.monotonic()
    datasets = datasets_of(
        options.lengths, setting.block_tokens, contexts_max=options.contexts, seed=options.seed
    )
    warm_up = warm_up_of(datasets)
    skipped: dict[str, str] = {}
    with ExitStack() as stack:
        load = Load(
            stations=_stations(
                stack,
                replace(
                    setting,
                    tokens=datasets[-1].length,
                    pool_tokens=pool_tokens([*datasets, warm_up]),
                ),
                skipped,
                peers=options.peers,
            ),
            at_once=options.at_once,
            max_tokens=options.answer,
            seed=options.seed,
            progress=progress,
        )
        progress("warming up")
        load.warm_up(warm_up)
        passes = [row for dataset in datasets for row in load.two_passes(dataset)]
        rates = _rates(load, datasets[0], passes, options.rates)
    variants = compare(
        replace(setting, tokens=datasets[min(1, len(datasets) - 1)].length),
        options.variants,
        repetitions=options.repetitions,
        seed=options.seed,
        progress=progress,
    )
    return {
        **origin(setting, "scripts/vllm-bench"),
        "seed": options.seed,
        "load_average_before": load_average,
        "elapsed_s": time.monotonic() - started,
        "at_once": options.at_once,
        "verdict": verdict(passes, rates, variants),
        "passes": passes,
        "rates": rates,
        "variants": variants,
        "peers_skipped": skipped,
    }


def _stations(
    stack: ExitStack, setting: Setting, skipped: dict[str, str], *, peers: bool
) -> list[Station]:
    arms: list[Arm] = [
        stack.enter_context(plain_arm(setting)),
        stack.enter_context(beluga_arm(setting)),
    ]
    for name, peer_arm in PEERS.items() if peers else ():
        try:
            arms.append(stack.enter_context(peer_arm(setting)))
        except PeerUnavailableError as error:
            skipped[name] = str(error)
            progress(f"{name}: skipped, {error}")
    stations = []
    for arm in arms:  # one by one, because starting takes much memory and all cores
        progress(f"starting vLLM: {arm.name}")
        stations.append(Station(stack, arm))
        stations[-1].ready()
    return stations


def _rates(load: Load, dataset: Dataset, passes: list[Row], rates: list[float]) -> list[Row]:
    """Run at multiples of the rate at which vLLM alone computed these requests."""
    own = [row for row in passes if row["arm"] == "plain" and row["length"] == dataset.length]
    capacity = sum(row["qps"] for row in own) / len(own)
    return [
        row | {"of_capacity": rate}
        for rate in rates
        for row in load.at_rate(dataset, rate * capacity)
    ]


def main() -> NoReturn:
    """Run the command."""
    options = _options()
    run_in_folder("vllm-bench", lambda folder: _run(options, folder))


def _run(options: argparse.Namespace, folder: Path) -> bool:
    python = os.environ.get(_PYTHON, sys.executable)
    progress(f"model: {options.model}, random weights")
    setting = Setting(
        folder=folder,
        model=model(options.model, python),
        size_name=options.model,
        tokens=max(map(cut, options.lengths)),
        python=python,
        timeout_ms=_TIMEOUT_MS,
    )
    report = measure(setting, options)
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        write_record(options.results / "vllm.json", report)
        for path in draw(report, options.results):
            progress(f"drawn: {path}")
    if options.json:
        print(json.dumps(report))
    else:
        print_tables(report)
    return bool(report["verdict"]["passed"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/vllm-bench", description=__doc__)
    add = parser.add_argument
    add("--json", action="store_true", help="print one object, as the last line")
    add("--quick", action="store_true", help="a tiny model and few requests: does it all run?")
    add("--peers", action="store_true", help="LMCache and Mooncake Store too")
    add("--model", choices=SIZES, help="how large (mid)")
    add("--lengths", type=_tokens, nargs="+", help="of prompts, in tokens (2048 4096 8192 15360)")
    add("--contexts", type=positive, help="at most, of a length; long ones have fewer (4)")
    add("--answer", type=positive, help="tokens of an answer (16)")
    add("--at-once", type=positive, default=1, help="requests at a time in the passes (1)")
    add("--rates", type=_rate, nargs="*", help="of what computing all can do (0.5 1 2 4), or none")
    add("--variants", choices=VARIANTS, nargs="*", help="which (all), or none")
    add("--repetitions", type=positive, help="of each variant (3)")
    add("--results", type=Path, help="folder for JSON and charts (bench/results; --quick: none)")
    add("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    options = parser.parse_args()
    for name, value in (_QUICK if options.quick else _USUAL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def _tokens(text: str) -> int:
    if not 512 <= int(text) <= 16000:
        raise argparse.ArgumentTypeError("512 to 16000")
    return int(text)


def _rate(text: str) -> float:
    if not float(text) > 0:
        raise argparse.ArgumentTypeError("more than 0")
    return float(text)


if __name__ == "__main__":
    main()
