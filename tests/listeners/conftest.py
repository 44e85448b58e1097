# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The attacked listeners. All tests of a file share them: the effects of one attack must not matter
to the next.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import forked

pytest.importorskip("aiohttp", reason="the router's packages are not installed")
pytest.importorskip("zmq", reason="pyzmq is not installed")

from attacked import Listener, Site, site


@pytest.fixture(scope="module")
def all_served(memory_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("listeners")
    folder = Path(tempfile.mkdtemp(prefix="beluga-test-", dir=memory_root))
    environment = {key: value for key, value in os.environ.items() if key != "BELUGA_POOL"}
    environment["XDG_STATE_HOME"] = str(home / "state")
    children = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        with (home / "log").open("a") as log:
            children.append(
                forked.Fork(
                    *(forked.server(), "from beluga.cli.main import main; main()"),
                    *([*map(str, arguments)], environment),
                    cwd=Path.cwd(),
                    stderr=log.fileno(),
                )
            )
        return children[-1]

    try:
        with site(start, folder, (f"ipc://{folder}/live", f"ipc://{folder}/again")) as made:
            yield made
    finally:
        for child in children:
            child.kill()
            child.communicate()
        shutil.rmtree(folder)


@pytest.fixture
def served(all_served: Site) -> Site:
    all_served.engine.begin()
    return all_served


@pytest.fixture(params=["clients", "operators", "admin port", "local socket"])
def listener(served: Site, request: pytest.FixtureRequest) -> Listener:
    return served.http[request.param]
