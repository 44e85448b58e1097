# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The benchmark of ``beluga gateway``: the time that it adds to a request, compared with a bare
proxy on the same library.

Two engines without a model stream at a fixed pace (``gateway_engine.py``). The same requests, 100
per second at random times, are sent through the bare proxy (``gateway_bare.py``) and through ours
in turn, and directly to an engine. Each of these is a separate process.
"""

from __future__ import annotations

import importlib.util
import tempfile
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import numpy.typing as npt

from beluga.child import command

from ..harness.options import Options
from ..harness.ratio import Ratio, compare
from ..harness.row import Recorder, Row, percentiles, shares
from ..vllm.port import HOST, free_port
from ..vllm.process import Child

RATE = 100  # requests per second
MODEL = "paced"
EVENTS = 8  # of each answer whose times are measured
_FEW, _MANY = 1, 65  # events of answers whose CPU time is measured
PREFILL_S = 0.01
PACE_S = 0.01
_READY_S = 60.0
_NEEDED = ("aiohttp", "msgspec")

_USUAL_SIZE = 4096  # bytes of a request: 1,000 tokens at four bytes each

Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request: the bytes of its body, and how many events its answer has before the end."""

    size: int
    events: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The seconds of each request of a run, of shape (requests,) each."""

    first: Times  # from sending to the first byte
    whole: Times  # from sending to the last byte


def bench_gateway(options: Options) -> list[Row]:
    """Return rows with the times to the first byte and to the last, and with the CPU time of
    requests and events, for ours and the bare proxy.
    """
    recorder = Recorder("gateway", options, {"memory": "loopback", "depth": RATE})
    lacking = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        return [recorder.skipped("time to first byte", f"there is no package {lacking[0]}")]
    with ExitStack() as stack:
        options.report("gateway: starting two engines and two proxies")
        targets = _start(stack)
        samples = _measure(options, {name: target.url for name, target in targets.items()})
        costs = _cpu(options, targets)
    return [
        _row(recorder, "time to first byte", {k: [s.first for s in v] for k, v in samples.items()}),
        _row(recorder, "time to last byte", {k: [s.whole for s in v] for k, v in samples.items()}),
        *(_cpu_row(recorder, case, costs[case], limit) for case, limit in _CPU_RATIO_MAX.items()),
    ]


@dataclass(frozen=True, slots=True)
class Target:
    """A process that answers requests."""

    url: str
    process: Child

    def cpu_us(self) -> float:
        """Return the CPU time of all its threads so far."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        return (
            sum(int((path / "schedstat").read_text().split()[0]) for path in tasks.iterdir()) / 1e3
        )


def _start(stack: ExitStack) -> dict[str, Target]:
    """Start the processes and wait for them."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="beluga-bench-")))

    def child(name: str, module: str, *arguments: str) -> Child:
        words = command(module, *arguments)
        return stack.enter_context(Child(words, log=folder / f"{name}.log"))

    ports = [free_port() for _ in range(4)]
    a, b, bare, ours = (f"http://{HOST}:{port}" for port in ports)
    started = [
        (child("engine-1", "beluga_bench.system.gateway_engine", str(ports[0])), f"{a}/health"),
        (child("engine-2", "beluga_bench.system.gateway_engine", str(ports[1])), f"{b}/health"),
        (child("bare", "beluga_bench.peers.gateway_bare", str(ports[2]), a, b), f"{bare}/ready"),
    ]
    words = ["gateway", "--worker", a, "--worker", b, "--port", str(ports[3]), "--admin", ""]
    started.append((child("ours", "beluga.cli.main", *words), f"{ours}/ready"))
    for process, url in started:
        process.wait_for(lambda url=url: _is_ready(url), _READY_S, "answer")  # type: ignore[misc]
    answering = {"engine": a, "bare": bare, "ours": ours}
    processes = {"engine": started[0][0], "bare": started[2][0], "ours": started[3][0]}
    return {name: Target(url, processes[name]) for name, url in answering.items()}


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):  # noqa: S310  a loopback address, made here
            return True
    except (urllib.error.URLError, OSError):
        return False


def _measure(options: Options, urls: dict[str, str]) -> dict[str, list[Sample]]:
    """Measure the proxies and the engine in pairs of runs; the order alternates, so that a drift of
    the machine affects all of them."""
    from .gateway_load import load

    count = 30 if options.smoke else 300
    sent = LoadRequest(_USUAL_SIZE, EVENTS)
    for url in urls.values():
        # This opens connections and warms up the code.
        load(url, sent, count=RATE // 5, rate=RATE, seed=options.seed)
    samples: dict[str, list[Sample]] = {name: [] for name in urls}
    for pair in range(options.pair_count):
        options.report(f"gateway: pair {pair + 1} of {options.pair_count}")
        for name in ("bare", "ours", "engine") if pair % 2 else ("ours", "bare", "engine"):
            samples[name].append(load(urls[name], sent, count=count, rate=RATE, seed=pair))
    return samples


_CPU_RATIO_MAX = {"CPU of 2 kB": 1.6, "CPU of an event": 1.2, "CPU of 64 kB": 2.0}
"""The targets of CPU time, as multiples of the bare proxy's, by case."""


def _cpu(options: Options, targets: dict[str, Target]) -> dict[str, list[tuple[float, float]]]:
    """Return the CPU microseconds of bare and ours in each pair, by case. Load on the machine slows
    both, so the runs are short and alternate.
    """
    from .gateway_load import load

    count = 20 if options.smoke else 100

    def each_us(name: str, sent: LoadRequest, seed: int, count: int) -> float:
        target = targets[name]
        before = target.cpu_us()
        load(target.url, sent, count=count, rate=RATE, seed=seed)
        return (target.cpu_us() - before) / count

    pairs: dict[str, list[tuple[float, float]]] = {case: [] for case in _CPU_RATIO_MAX}
    for pair in range(options.pair_count):
        options.report(f"gateway: CPU time, pair {pair + 1} of {options.pair_count}")
        costs: dict[str, tuple[float, float, float]] = {}
        for name in ("bare", "ours") if pair % 2 else ("ours", "bare"):
            small = each_us(name, LoadRequest(2048, _FEW), pair, count)
            long = each_us(name, LoadRequest(2048, _MANY), pair, count // 4)
            large = each_us(name, LoadRequest(65536, _FEW), pair, count)
            costs[name] = small, (long - small) / (_MANY - _FEW), large
        for case, bare, ours in zip(_CPU_RATIO_MAX, costs["bare"], costs["ours"], strict=True):
            pairs[case].append((bare, ours))
    return pairs


def _cpu_row(recorder: Recorder, case: str, pairs: list[tuple[float, float]], limit: float) -> Row:
    """Make the row of a CPU time: how often a CPU does it in a second."""
    results = compare([(1e6 / bare, 1e6 / ours) for bare, ours in pairs])
    note = (
        f"{1 / results.ratio:.2f} times the bare proxy's (target <= {limit}); "
        f"bare {1e6 / results.limit:.0f} us, ours {1e6 / results.ours:.0f} us"
    )
    return recorder.row(
        case,
        ops_per_s=round(results.ours),
        limit=round(results.limit),
        limit_unit="1/s",
        **shares(results),
        note=note,
    )


def _row(recorder: Recorder, case: str, times: dict[str, list[Times]]) -> Row:
    """Make the row of a figure: what ours adds to the bare proxy's median, pair by pair."""
    middles = {name: [float(np.median(run)) for run in runs] for name, runs in times.items()}
    added_ms = [
        (ours - bare) * 1e3 for ours, bare in zip(middles["ours"], middles["bare"], strict=True)
    ]
    first, _, third = quantiles(added_ms, n=4, method="inclusive")
    ratio: Ratio = compare(
        [(1 / bare, 1 / ours) for bare, ours in zip(middles["bare"], middles["ours"], strict=True)]
    )
    tails = {name: float(np.percentile(np.concatenate(runs), 99)) for name, runs in times.items()}
    note = (
        f"adds {median(added_ms):.2f} ms to the bare proxy's p50 "
        f"({first:.2f}..{third:.2f}, target <= 1); p50 / p99 ms: "
        + ", ".join(
            f"{name} {median(middles[name]) * 1e3:.2f} / {tails[name] * 1e3:.2f}"
            for name in ("engine", "bare", "ours")
        )
    )
    whole = np.concatenate(times["ours"])
    return recorder.row(
        case,
        **percentiles((whole * 1e9).astype(np.uint64)),
        ops_per_s=RATE,
        limit=round(ratio.limit, 2),
        limit_unit="1/s",
        **shares(ratio),
        note=note,
    )
