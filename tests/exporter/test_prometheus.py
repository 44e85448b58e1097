# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A real Prometheus scrapes a server under load for a minute: every query of the dashboard has
data, nothing fires, and each planted fault fires its alert.

The rules are those of docs/monitoring/alerts.yml with seconds in place of their minutes.
"""

import json
import math
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from beluga_bench.vllm.port import free_port
from support.blocks import eventually
from support.commands import captured
from support.packages import program

from beluga import KVCache, Pool
from beluga.errors import BelugaError
from beluga.rpc import Client
from beluga.transfer import LinkSettings, host_link, settings_for
from beluga.transfer.link import Speed
from tests.exporter.scraped import raw, scrape
from tests.rpc.other_machine import OtherMachine

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "docs/monitoring"
WINDOW_S = 6
LOAD_S = 60
LENGTH = 64 << 10
TABLE = 2048
KEYS = 1400  # more blocks than the pool has room for
BATCH = 16

HANDLERS = """
from beluga import Handlers

handlers = Handlers()


@handlers.add
def double(number: int) -> int:
    return 2 * number
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def tools() -> tuple[str, str]:
    """The paths of prometheus and promtool."""
    return program("prometheus"), program("promtool", "prometheus")


class Load(threading.Thread):
    """A client that puts and gets blocks as engines do, or whatever ``work`` is set to."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(daemon=True)
        self._pool, self._ended = pool, threading.Event()
        self.work: Callable[[KVCache, int], None] = self.turn
        self.failure: BaseException | None = None
        self._blocks = np.random.default_rng(5).integers(0, 256, (BATCH, LENGTH), np.uint8)
        self._targets = np.zeros_like(self._blocks)

    @staticmethod
    def names(first: int, count: int = BATCH, *, of: int = KEYS) -> list[bytes]:
        return [((first + i) % of).to_bytes(16, "little") for i in range(count)]

    def turn(self, cache: KVCache, number: int) -> None:
        """Look up a batch, get the hits, and put the misses."""
        names = self.names(number * BATCH)
        hits = cache.lookup(names)
        hits = cache.get(names, self._targets).hits
        assert cache.client.call("double", number, returns=int) == 2 * number
        cache.client.report.saved(16 * hits, 16 * hits * 77e-6)
        if hits < BATCH:
            cache.put(names[hits:], self._blocks[hits:])
        cache.put(self.names((1 << 30) + number, 1, of=1 << 40), self._blocks[:1])

    def miss(self, cache: KVCache, number: int) -> None:
        """Look up keys that were not stored."""
        cache.lookup(self.names(number, 4, of=1 << 40))
        assert cache.get(self.names((1 << 40) + number, 4, of=1 << 60), self._targets[:4]).hits == 0

    def small(self, cache: KVCache, number: int) -> None:
        """Put small blocks, which fill the table before they fill the space."""
        names = self.names((1 << 50) + number * 64, 64, of=1 << 60)
        cache.put(names, np.zeros((64, 512), np.uint8))

    def run(self) -> None:
        number = 0
        try:
            with KVCache(self._pool, namespace="load", link=settings_for(self._pool)) as cache:
                while not self._ended.wait(0.02):
                    self.work(cache, number)
                    number += 1
        except BelugaError as error:
            self.failure = error

    def end(self) -> None:
        self._ended.set()
        self.join(60)


class Prometheus:
    """A Prometheus with its own port, which scrapes each second."""

    def __init__(self, program: str, directory: Path, target: str, rules: str) -> None:
        self.port = free_port()
        directory.mkdir()
        (directory / "alerts.yml").write_text(rules)
        (directory / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
            "rule_files: [alerts.yml]\n"
            "scrape_configs:\n"
            "  - job_name: beluga\n"
            f"    static_configs: [{{targets: ['{target}']}}]\n"
        )
        self._log = (directory / "log").open("w")
        self._process = subprocess.Popen(
            [
                program,
                f"--config.file={directory}/prometheus.yml",
                f"--storage.tsdb.path={directory}/data",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        assert eventually(self._ready, 120), (directory / "log").read_text()

    def query(self, expr: str) -> list[float]:
        """Return the values that a query has now, without those that are not numbers."""
        samples = self._get("query", query=expr)["result"]
        if samples and not isinstance(samples[0], dict):
            samples = [{"value": samples}]
        values = [float(sample["value"][1]) for sample in samples]
        return [value for value in values if not math.isnan(value)]

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        alerts = self._get("alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _ready(self) -> bool:
        try:
            return bool(self._get("status/runtimeinfo"))
        except (OSError, urllib.error.URLError):
            return False

    def _get(self, what: str, **requested: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{what}?{urllib.parse.urlencode(requested)}"
        answer = json.loads(raw(url, kind="application/json"))
        assert answer["status"] == "success"
        return answer["data"]


def quick(rules: str) -> str:
    """Return rules with seconds in place of minutes."""
    return re.sub(r"for: \d+m", "for: 2s", re.sub(r"\[\d+m\]", f"[{WINDOW_S}s]", rules))


def queries() -> Iterator[tuple[str, str]]:
    """Yield the title of each panel of the dashboard with each of its queries, without those of the
    memory of replayed engines, which a server does not have.
    """
    for panel in json.loads((MONITORING / "dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", []):
            expr = target["expr"].replace("$__rate_interval", "30s").replace("$instance", ".*")
            if "beluga_kvbm_" not in expr:
                yield panel["title"], expr


def serve(
    start: Start, paths: list[Path], port: int, folder: Path, *options: str
) -> subprocess.Popen[str]:
    """Serve the pool and the handlers of ``folder``."""
    pools = [word for path in paths for word in ("--pool", str(path))]
    (folder / "jobs.py").write_text(HANDLERS)
    handlers = ("--handlers", "jobs:handlers")
    server = start("serve", *pools, "--admin", str(port), *handlers, *options, cwd=folder)
    assert server.stderr
    assert server.stderr.readline().startswith("page at")
    assert server.stderr.readline().startswith("serving")
    return server


def test_promtool_accepts_the_rules(tools: tuple[str, str]) -> None:
    command = [tools[1], "check", "rules", str(MONITORING / "alerts.yml")]
    checked = captured(command, timeout=120)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.timeout(600)
def test_the_dashboard_has_data_and_planted_faults_raise_alerts(
    tools: tuple[str, str], start: Start, shm: Path, tmp_path: Path
) -> None:
    paths, port = [shm / "a", shm / "b"], free_port()
    disk = "--disk", f"{tmp_path}/disk", "--disk-bytes", "256M", "--admission", "always"
    options = {"device_size": 32 << 20, "coherence": "software", "max_blocks": TABLE}
    pool = Pool.create(paths, **options)
    narrow = Speed(20_000_000_000)  # a link that is no wider than that of a CXL switch
    link = host_link(pool, LinkSettings(read=narrow, write=narrow, device=narrow))
    server = serve(start, paths, port, tmp_path, *disk)
    rules = quick((MONITORING / "alerts.yml").read_text())
    prometheus = Prometheus(tools[0], tmp_path / "prometheus", f"127.0.0.1:{port}", rules)
    with pool:
        load = Load(pool)
        load.start()
        try:
            time.sleep(LOAD_S)  # the minute that the test is about
            assert load.failure is None
            quiet = prometheus.firing()
            empty = [f"{title}: {expr}" for title, expr in queries() if not prometheus.query(expr)]
            assert not empty, "\n".join(empty)
            assert quiet <= {"BelugaChurn"}  # the load evicts on purpose
            scraped = scrape(f"http://127.0.0.1:{port}/metrics")
            spent_s = scraped.value("beluga_exporter_seconds_total")
            assert spent_s / scraped.value("beluga_exporter_scrapes_total") / 15 < 0.01  # of a core
            load.work = load.miss
            assert eventually(lambda: "BelugaHitRateZero" in prometheus.firing(), 60)
            load.work = load.small
            assert eventually(lambda: "BelugaTableFull" in prometheus.firing(), 60)
            assert eventually(lambda: "BelugaHitRateZero" not in prometheus.firing(), 60)
        finally:
            load.end()
        link.close()
        with KVCache(pool, namespace="load") as cache:  # extents with free space
            assert cache.put(Load.names(0, 1), np.zeros((1, LENGTH), np.uint8)).refused == 0
        assert OtherMachine(pool, host=3, boot_id=(7, 9)).attach(0x5EED) == 0
        assert "BelugaQuarantine" not in prometheus.firing()
        server.send_signal(signal.SIGKILL)
        server.wait()
        assert eventually(lambda: "BelugaServerDown" in prometheus.firing(), 60)
        serve(start, paths, port, tmp_path)
        alerts = {"BelugaQuarantine", "BelugaSuspectSessions"}
        assert eventually(lambda: alerts <= prometheus.firing(), 60)
        assert "BelugaServerDown" not in prometheus.firing()
        with Client(pool) as client:  # and it serves nevertheless
            client.ping()
    prometheus.close()
