# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Reads Prometheus's text format as a scraper does."""

import re
import urllib.error
import urllib.request

SERIES = re.compile(r"([a-z_]+)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


class Scrape:
    """The time series of one scrape."""

    def __init__(self, text: str) -> None:
        self.kinds: dict[str, str] = {}
        self.series: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for line in text.splitlines():
            if line.startswith("# TYPE "):
                name, kind = line.split()[2:]
                self.kinds[name] = kind
            elif not line.startswith("#"):
                match = SERIES.fullmatch(line)
                assert match, line
                labels = tuple(sorted(LABEL.findall(match[2] or "")))
                assert labels not in self.series.get(match[1], {}), f"twice: {line}"
                self.series.setdefault(match[1], {})[labels] = float(match[3])

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the series that have these labels; 0 if none has."""
        required = set(labels.items())
        items = self.series.get(name, {}).items()
        return sum(value for have, value in items if required <= set(have))

    def labels(self, name: str, label: str) -> set[str]:
        """Return the values of a label."""
        return {dict(labels)[label] for labels in self.series.get(name, {})}


TEXT = "text/plain; version=0.0.4; charset=utf-8"


def raw(url: str, data: bytes | None = None, *, kind: str = TEXT) -> bytes:
    """Return the body of an answer to a GET, or to a POST of data."""
    with urllib.request.urlopen(url, data, timeout=30) as answer:  # noqa: S310
        assert answer.headers["Content-Type"] == kind
        return bytes(answer.read())


def scrape(url: str) -> Scrape:
    """Scrape a server."""
    return Scrape(raw(url).decode())


def status_of(url: str) -> int:
    """Return the status of an answer."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
