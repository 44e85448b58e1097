# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command ``scripts/vllm-demo``: how much faster a second vLLM process is with KV that the
first one has computed.

No process and no file in memory is left behind, even after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import random
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from beluga.errors import TransferError
from beluga.transfer import parse_settings

from . import beside
from .arm import MEMORY, Arm, Setting, beluga_arm, plain_arm
from .command import positive, progress, run_in_folder
from .limit import limit_loop
from .measure import Pair, run
from .model import SIZES, model
from .peers import PEERS, PeerUnavailableError
from .prompts import prompts
from .report import Report, print_table, report_of
from .serve import compare_servers

_TOKENS, _BESIDE_TOKENS = 3841, 4097  # prompts of 90 MiB and 1 GiB of KV
_WARMUPS = 3  # prompts that touch all of an engine's KV memory once


def measure(setting: Setting, *, repetitions: int, peers: bool, seed: int) -> Report:
    """Run the comparison. Raises BelugaError if a process dies or fails."""
    skipped: dict[str, str] = {}
    with ExitStack() as stack:
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
        pairs = [_pair(stack, arm) for arm in arms]
        loop = stack.enter_context(limit_loop(MEMORY, setting.hit_bytes))
        fresh = prompts(setting.tokens, seed)
        run(
            pairs,
            fresh,
            count=_WARMUPS,
            limit=loop.seconds,
            progress=lambda s: progress(f"warm-up {s}"),
        )
        samples, limits = run(
            pairs, fresh, count=repetitions, limit=loop.seconds, progress=progress
        )
    return report_of(setting, samples, limits, skipped)


def _pair(stack: ExitStack, arm: Arm) -> Pair:
    """Start the arm's engines, two at a time, because starting takes much memory and both cores."""
    progress(f"starting vLLM: {arm.name}")
    roles = ("A",) if arm.connector is None else ("A", "B")
    engines = [stack.enter_context(arm.engine(role)) for role in roles]
    for engine in engines:
        engine.ready()
    return Pair(arm, engines)


def main() -> NoReturn:
    """Run the command. The exit status is 0 only if everything was measured."""
    options = _options()
    run_in_folder("vllm-demo", lambda folder: _run(options, folder))


def _run(options: argparse.Namespace, folder: Path) -> bool:
    size = options.model or ("broad" if options.beside else "mid")
    tokens = options.tokens or (_BESIDE_TOKENS if options.beside else _TOKENS)
    progress(f"model: {size}, random weights")
    setting = Setting(folder=folder, model=model(size), size_name=size, tokens=tokens)
    if options.beside:
        setting = beside.setting_of(setting, options.link)
        report = beside.measure(
            setting, rounds=options.repetitions, seed=options.seed, progress=progress
        )
        if not options.json:
            beside.print_lines(report)
    elif options.serve:
        report = compare_servers(setting, seed=options.seed, progress=progress)
    else:
        report = measure(
            setting,
            repetitions=options.repetitions,
            peers=options.peers,
            seed=options.seed,
        )
        if not options.json:
            print_table(report)
    if options.json or options.serve:
        print(json.dumps(report))
    return bool(report.get("passed", True))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/vllm-demo", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one object, as the last line")
    parser.add_argument("--tokens", type=_tokens, help="of a prompt (3841; beside: 4097)")
    parser.add_argument("--repetitions", type=positive, default=10, help="to take medians of (10)")
    parser.add_argument("--peers", action="store_true", help="LMCache and Mooncake Store too")
    parser.add_argument("--serve", action="store_true", help="two `vllm serve` instead, over HTTP")
    parser.add_argument("--beside", action="store_true", help="a load of 1 GiB beside 16 answers")
    parser.add_argument(
        "--link", type=_link, default="8", help="GB/s of the memory for --beside (8)"
    )
    parser.add_argument("--model", choices=SIZES, help="how large (mid; beside: broad)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    return parser.parse_args()


def _tokens(text: str) -> int:
    if not 129 <= int(text) <= 16000:
        raise argparse.ArgumentTypeError("129 to 16000: more than one block of the KV cache")
    return int(text)


def _link(text: str) -> str:
    try:
        parse_settings(text)
    except TransferError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


if __name__ == "__main__":
    main()
