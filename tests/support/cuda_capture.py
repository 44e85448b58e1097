# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The capture of a stream's work into a graph, which the emulated driver lacks.

An engine reads whether a stream is capturing; it never begins a capture itself.
"""

from collections.abc import Callable

from beluga_bench.gpu.host_driver import HostDriver

Work = Callable[[], object]


def begin_capture(driver: HostDriver, stream: int) -> None:
    """Record the work that is put on the stream, without doing it."""
    driver._streams[stream].graph = []


def end_capture(driver: HostDriver, stream: int) -> list[Work]:
    """End the recording and return the graph."""
    graph, driver._streams[stream].graph = driver._streams[stream].graph, None
    return graph or []


def replay(driver: HostDriver, graph: list[Work], stream: int) -> None:
    for work in graph:
        driver._streams[stream].put(work)
