# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``scripts/docs`` builds the site, and fails if pages have errors."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout whose pages may be changed; all other files are those of the real one."""
    pytest.importorskip("mkdocs", reason="scripts/docs installs mkdocs")
    pytest.importorskip("mkdocstrings", reason="scripts/docs installs mkdocstrings")
    if not (ROOT / ".venv/bin/python").exists():
        pytest.skip("scripts/docs uses .venv")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "scripts/dev").mkdir(parents=True)
    for name in ("docs", "dev/docs_pages.py", "dev/help.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    # the packages that it would install are present
    for name in ("dev/setup-env", "dev/setup-extra"):
        (tmp_path / "scripts" / name).write_text("#!/bin/sh\n")
        (tmp_path / "scripts" / name).chmod(0o755)
    for generator in (ROOT / "scripts/dev").glob("gen_*.py"):  # they have tests of their own
        (tmp_path / "scripts/dev" / generator.name).touch()
    names = ("mkdocs.yml", "README.md", "CHANGELOG.md", ".venv", "beluga", "bench", "csrc", "tests")
    for name in (*names, "LICENSE"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def build(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tree / "scripts/docs"], capture_output=True, text=True, check=False)


@pytest.mark.long
def test_the_site_has_every_page_and_fails_on_dead_links(tree: Path) -> None:
    built = build(tree)
    assert built.returncode == 0, built.stderr
    pages = {path.stem for path in (tree / "docs").rglob("*.md")}
    assert pages | {"index", "core", "format", "changes"} <= {
        path.stem for path in (tree / "site").rglob("*.html")
    }
    style = (tree / "site/stylesheets/site.css").read_text()  # code in tables keeps its words whole
    assert "word-break: normal" in style and "overflow-wrap: normal" in style
    assert "stylesheets/site.css" in (tree / "site/reference/commands.html").read_text()
    with (tree / "docs/start/concepts.md").open("a") as page:
        page.write("[a](nowhere.md) [b](../use/vllm.md#nothing) [c](../../csrc/gone.c)\n")
    (tree / "docs/unlisted.md").write_text("# Nobody leads here\n")
    broken = build(tree)
    assert broken.returncode == 1
    for word in ("nowhere.md", "#nothing", "gone.c", "unlisted.md"):
        assert word in broken.stderr
