# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The ``console`` and ``python`` blocks of README and docs/ run, and print the output that they
show. Each page is a session in its own folder in /dev/shm, which has its devices, too.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.commands import captured
from support.shown import PAGES, Block, Shown, blocks, commands, name_of, outline

from beluga.pool import scratch_folder

RUN = ("console", "python")
SESSIONS = [path for path in PAGES if any(block.language in RUN for block in blocks(path))]
FIRST = {"README.md"}  # the pages that a newcomer reads first
TIMEOUT_S = 60
# Names that a page's Python may use without a definition, because another page shows it.
GIVEN = {
    "copy-engines.md": """
import numpy as np
from beluga import IndexServer, Pool
from beluga.transfer import CpuEngine as ToyEngine
pool = Pool.create(["/dev/shm/plans"], device_size=64 << 20, force=True)
server = IndexServer(pool)
server.start()
kv_tensors = [np.zeros((2, 64, 16, 2, 8), np.float32) for _ in range(2)]
digests = [bytes([i]) * 16 for i in range(2)]
block_ids, other_ids = [3, 4], [5, 6]
""",
}
AFTER = {
    "copy-engines.md": "\ncache.close()\nserver.stop()\npool.close()\n"
    'Pool.destroy("/dev/shm/plans")\n'
}
KEPT = {
    "operations.md": ["kv-a", "kv-a.run", "kv-b"]
}  # pools that a page leaves: its subject is a running one


class Session:
    """One page's commands, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._behind: list[subprocess.Popen[str]] = []
        self._programs: set[str] = set()
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("BELUGA_")},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "XDG_STATE_HOME": str(folder / "state"),
            "COLUMNS": "250",  # no column of a table is cut
        }

    def run(self, shown: Shown) -> str:
        """Return the output of a command, or the first line of one that stays in the background."""
        line = shown.line.replace("/dev/shm", str(self.folder))
        # which also creates the environment
        line = re.sub(r"^scripts/demo\b", "beluga replay", line)
        if line.endswith("&"):
            return self._begin(line.rstrip("& "))
        if job := re.match(r"kill %(\d+) && wait$", line):
            self._behind[int(job[1]) - 1].terminate()
            self._behind[int(job[1]) - 1].communicate(timeout=TIMEOUT_S)
            return ""
        return self._run(["/bin/bash", "-c", line])

    def run_python(self, text: str) -> str:
        if named := re.match(r"# (\w+\.py)\n", text):  # a file that later blocks import
            (self.folder / named[1]).write_text(text)
            self._programs.add(named[1])
        return self._run([sys.executable, "-c", text.replace("/dev/shm", str(self.folder))])

    def _run(self, command: list[str]) -> str:
        ended = captured(command, cwd=self.folder, env=self._environment, timeout=TIMEOUT_S)
        assert ended.returncode == 0, f"{command[-1]}\n{ended.stderr}"
        return ended.stdout or ended.stderr

    def _begin(self, line: str) -> str:
        process = subprocess.Popen(
            ["/bin/bash", "-c", f"exec {line}"],
            cwd=self.folder,
            env=self._environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._behind.append(process)
        assert process.stderr is not None
        return process.stderr.readline()

    def leftovers(self) -> list[str]:
        """Return what the page has left: devices of pools, which take memory, and other files."""
        programs = {"state", "__pycache__", "beluga-owner.lock", *self._programs}
        return sorted(path.name for path in self.folder.iterdir() if path.name not in programs)

    def end(self) -> None:
        for process in self._behind:
            process.terminate()
            process.communicate(timeout=TIMEOUT_S)


@pytest.fixture
def session() -> Iterator[Session]:
    if not Path(sys.executable).with_name("beluga").exists():
        pytest.skip(f"beluga is not installed beside {sys.executable}")
    with scratch_folder("docs", Path("/dev/shm")) as folder:
        session = Session(folder)
        try:
            yield session
        finally:
            session.end()


def printed(text: str) -> list[str]:
    """Return the output that a program's comments show: ``print(...)  # 8: as many``."""
    return re.findall(r"^\s*print\(.*\)  # ([^:\n]+)", text, re.MULTILINE)


def needs_torch(block: Block) -> bool:
    return block.language == "python" and "\nimport torch\n" in block.text


def play(session: Session, page: Path, block: Block) -> None:
    if block.language == "python":
        text = GIVEN.get(page.name, "") + block.text + AFTER.get(page.name, "")
        assert session.run_python(text).split() == " ".join(printed(block.text)).split()
    for shown in commands(block) if block.language == "console" else ():
        output = session.run(shown)
        if shown.output:
            expected = "\n".join(shown.output).replace("/dev/shm", str(session.folder))
            assert outline(output) == outline(expected), shown.line


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if name_of(page) in FIRST else [pytest.mark.long])
        for page in SESSIONS
    ],
    ids=name_of,
)
def test_a_page_runs_as_shown(page: Path, session: Session) -> None:
    lacks_torch = find_spec("torch") is None
    parts = blocks(page)
    for block in parts:
        if not (lacks_torch and needs_torch(block)):
            play(session, page, block)
    session.end()
    assert session.leftovers() == KEPT.get(page.name, [])
    if lacks_torch and any(map(needs_torch, parts)):
        pytest.skip("torch is not installed; the programs with torch were left out")


def test_pages_have_commands_to_run() -> None:
    shown = [s for p in SESSIONS for b in blocks(p) if b.language == "console" for s in commands(b)]
    assert len(shown) >= 10
    assert {"README.md", "docs/start/quickstart.md", "docs/operate/operations.md"} <= set(
        map(name_of, SESSIONS)
    )


def test_a_changed_output_is_detected(session: Session, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ echo one 2 three\none 5 three\n$ echo two\nthree\n```\n")
    (block,) = blocks(page)
    with pytest.raises(AssertionError, match="echo two"):
        play(session, page, block)
    assert outline("┃ a ┃ b ┃\n├───┤\n│ lanes │ 16 of 256 │") == [
        "a b",
        "lanes 0 of 0",
    ]
