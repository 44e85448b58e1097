# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""scripts/check with stand-ins for its commands, the site that scripts/docs builds, help, and the
tests that scripts name.
"""

import os
import pty
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.commands import captured

# ---- ``scripts/check`` with stand-ins for its commands: what it runs and prints, and its exit
# status. Also that ``scripts/ci/test-aarch64`` runs every test, or omits it with a reason; that
# a script with --help does nothing else; and that the tests that a script names exist.


ROOT = Path(__file__).resolve().parents[2]
CALLED = sorted(set(re.findall(r"scripts/([\w/-]+)", (ROOT / "scripts/check").read_text())))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout in which all programs do nothing."""
    for room in ("ci", "dev"):
        (tmp_path / "scripts" / room).mkdir(parents=True)
    for name in CALLED:
        stand_in(tmp_path / "scripts" / name)
    for name in ("check", "dev/help.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    stand_in(tmp_path / ".venv/bin/python")
    stand_in(tmp_path / ".venv/bin/beluga")
    stand_in(tmp_path / "scripts/test", "2 passed")
    return tmp_path


def stand_in(path: Path, text: str = "", status: int = 0) -> None:
    last = f"echo {text}\n" if text else ""
    path.write_text(f'#!/bin/sh\necho "ran {path.name} $*"\n{last}exit {status}\n')
    path.chmod(0o755)


def check(tree: Path, *arguments: str, budget_s: int = 3900) -> tuple[int, list[str]]:
    script = tree / "scripts/check"
    text = re.sub(r"budget_s=\d+", f"budget_s={budget_s}", script.read_text())
    script.write_text(text)
    ended = captured([script, *arguments], stdin=subprocess.DEVNULL)
    return ended.returncode, ended.stdout.splitlines()


def test_a_passing_run_ends_with_the_test_summary(tree: Path) -> None:
    status, lines = check(tree, "--ci", "-k", "one")
    assert (status, lines[-2:]) == (0, ["ran test -m not slow -k one", "2 passed"])
    assert [line for line in lines if "left out" in line or "failed" in line] == []
    for name in ("test-pythons", "test-packages", "mutants", "soak", "fuzz", "setup-adapters"):
        assert any(line.startswith(f"ran {name}") for line in lines), name


def test_a_failure_is_reported_and_sets_the_exit_status(tree: Path) -> None:
    stand_in(tree / "scripts/fuzz", status=1)
    stand_in(tree / "scripts/ci/test-pythons", status=77)
    stand_in(tree / "scripts/mutants", status=124)
    status, lines = check(tree, "--ci")
    assert (status, lines[-1]) == (1, "2 passed")
    assert "== failed: fuzz" in lines
    assert "== lacking: pythons" in lines
    assert "== cut off: mutants" in lines


def test_failed_tests_set_the_exit_status(tree: Path) -> None:
    stand_in(tree / "scripts/test", "1 failed", status=1)
    assert check(tree)[0] == 1


def test_steps_beyond_the_time_limit_are_skipped_and_listed(tree: Path) -> None:
    status, lines = check(tree, "--ci", budget_s=1200 + 360)
    assert (status, lines[-1]) == (0, "2 passed")
    assert "== left out: readme hosts aarch64 mutants adapters engines slow" in lines
    assert any(line.startswith("ran soak") for line in lines)


def test_all_has_no_time_limit(tree: Path) -> None:
    status, lines = check(tree, "--all", budget_s=0)
    assert status == 0
    assert not any("left out" in line for line in lines)


def test_the_default_check_has_no_long_step(tree: Path) -> None:
    _, lines = check(tree)
    assert "ran docs --check" in lines
    assert not any(line.startswith(("ran soak", "ran mutants", "ran test-")) for line in lines)


SCRIPTS = [
    path
    for path in sorted((ROOT / "scripts").rglob("*"))
    if path.is_file() and path.read_bytes().startswith(b"#!")
]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """The sources that a script may write to."""
    for name in ("scripts", "beluga", "csrc", "docs"):
        passing = shutil.ignore_patterns("__pycache__", "images")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=passing)
    shutil.copytree(ROOT / "bench", tmp_path / "bench", ignore=shutil.ignore_patterns("results"))
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def state(folder: Path) -> dict[Path, tuple[int, int]]:
    found = {path: path.stat() for path in folder.rglob("*") if "__pycache__" not in path.parts}
    return {path: (one.st_mtime_ns, one.st_size) for path, one in found.items() if path.is_file()}


@pytest.mark.parametrize("option", ["--help", pytest.param("-h", marks=pytest.mark.long)])
def test_a_script_with_help_prints_help_and_does_nothing_else(sources: Path, option: str) -> None:
    """A script with --help starts no program except the few that print its help, and changes no
    file.
    """
    assert len(SCRIPTS) > 40
    programs = sources / "programs"
    programs.mkdir()
    for name in ("bash", "env", "dirname", "awk"):
        (programs / name).symlink_to(shutil.which(name) or name)
    (programs / "python3").symlink_to(sys.executable)
    before = state(sources)
    for script in SCRIPTS:
        python = script.suffix == ".py"
        command = [sys.executable] if python else [programs / "bash"]
        ended = captured(
            [*command, sources / script.relative_to(ROOT), option],
            cwd=sources,
            env={"PATH": str(programs), "PYTHONPATH": str(ROOT)},
        )
        assert (ended.returncode, ended.stderr) == (0, ""), script.name
        name = "usage" if python else script.name
        assert ended.stdout.startswith(name), f"{script.name}: its help begins with its name"
        assert len(ended.stdout.splitlines()) >= 2, script.name
    assert state(sources) == before


def test_help_is_found_after_other_arguments(tmp_path: Path) -> None:
    (tmp_path / "made").write_text(
        f"#!/usr/bin/env bash\n# made: it is.\n\n. {ROOT}/scripts/dev/help.sh\necho done\n"
    )
    for arguments, expected in (
        ([], "done\n"),
        (["-a", "1", "-h"], "made: it is.\n"),
        (["--", "-h"], "done\n"),
    ):
        ended = subprocess.run(
            ["/bin/bash", tmp_path / "made", *arguments], capture_output=True, text=True, check=True
        )
        assert ended.stdout == expected


LONG = """set -euo pipefail
. "$1/scripts/dev/progress.sh"
shown "$2/log" "made: working" sh -c 'echo compiling 1 of 2
    until [ -e "$0/seen" ]; do sleep 0.1; done
    exit 7' "$2" || echo "status $?"
"""


def test_a_long_command_is_shown_while_it_runs_and_its_status_is_kept(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = ["bash", "-c", LONG, "made", ROOT, tmp_path]
    environ = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environ) as script:
        os.close(theirs)
        drawn = b""
        while b"made: working, 1 s: compiling 1 of 2" not in drawn:
            drawn += os.read(ours, 1000)  # ends with an error if the script ends
        (tmp_path / "seen").touch()
        assert script.communicate()[0] == b"status 7\n"
    os.close(ours)


def test_a_short_command_shows_nothing_where_no_terminal_is(tmp_path: Path) -> None:
    (tmp_path / "seen").touch()
    command = ["bash", "-c", LONG, "made", ROOT, tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("status 7\n", "")
    assert (tmp_path / "log").read_text() == "compiling 1 of 2\n"


def test_every_test_runs_for_aarch64_or_is_left_out_with_a_reason() -> None:
    script = (ROOT / "scripts/ci/test-aarch64").read_text()
    parts = re.search(r"^quick=\((.*?)\)$.*<<'END'\n(.*?)^END$", script, re.DOTALL | re.MULTILINE)
    assert parts
    quick = parts[1].split()
    left_out = [name for line in parts[2].splitlines() for name in line.split(": ")[-1].split()]
    tests = ROOT / "tests"
    for path in tests.rglob("test_*.py"):
        name = str(path.relative_to(tests))
        of = [one for one in quick + left_out if name == one or name.startswith(f"{one}/")]
        assert len(of) == 1, f"{name} is in {of}: scripts/ci/test-aarch64 names each test once"
    assert [one for one in quick + left_out if not (tests / one).exists()] == []


def expanded(path: str) -> list[str]:
    """Return the paths of a pattern of the shell with at most one list in braces."""
    before, brace, rest = path.partition("{")
    choices, _, after = rest.partition("}")
    return [before + choice + after for choice in choices.split(",")] if brace else [path]


FILES = sorted(
    path
    for path in (ROOT / "scripts").rglob("*")
    if path.is_file() and path.parent.name != "__pycache__"
)


@pytest.mark.parametrize("script", FILES, ids=lambda path: path.name)
def test_the_tests_that_a_script_names_exist(script: Path) -> None:
    """A renamed test once left ``scripts/gpu sanitize`` without one."""
    text = re.sub(r"\\\n\s*", "", script.read_text(encoding="utf-8"))
    for command in text.splitlines():
        matches = re.findall(r"\btests/[\w/{},]+\.py(?:::\w+)?", command)
        sources = ""
        for path, _, function in (
            each.partition("::") for one in matches for each in expanded(one)
        ):
            assert (ROOT / path).is_file(), f"{script.name} names {path}"
            source = (ROOT / path).read_text(encoding="utf-8")
            assert not function or f"def {function}(" in source, f"{script.name} names {function}"
            sources += path + source
        for selection in re.findall(r"-k '?([\w() ]+)'?", command) if matches else []:
            words = set(re.findall(r"\w+", selection)) - {"and", "or", "not"}
            assert [word for word in words if word not in sources] == [], f"{script.name}: -k"


@pytest.mark.parametrize("target", sorted((ROOT / "tests/fuzz").glob("*.c")), ids=lambda p: p.name)
def test_every_fuzz_target_compiles(target: Path) -> None:
    """scripts/fuzz needs clang, and stops at the first target that does not compile."""
    flags = ["-std=gnu11", "-fsyntax-only", "-w", "-DBL_FORMAT_HASH=1", f"-I{ROOT / 'csrc'}"]
    ended = captured([shutil.which("cc") or "cc", *flags, target])
    assert ended.returncode == 0, ended.stderr


# ---- ``scripts/docs`` builds the site, and fails if pages have errors. The site can be read with
# a screen reader and a keyboard, as far as its HTML alone shows it: rules of axe with their names.


NAMED = {"a": "link-name", "button": "button-name", "summary": "summary-name"}
NO_END = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}
ARIA = {"label", "labelledby", "describedby", "hidden", "controls", "expanded", "current", "live"}
REFERENCES = ("aria-labelledby", "aria-describedby", "aria-controls", "for")


class Readable(HTMLParser):
    """Collects the faults of a page: the name of the rule, and where."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.faults: list[tuple[str, object]] = []
        self._open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._ids: Counter[str | None] = Counter()
        self._references: set[str] = set()
        self._inputs: list[dict[str, str | None]] = []
        self._levels: list[int] = []
        self._title = ""
        self.feed(html)
        self._check()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        has = dict(attributes)
        self._ids.update([has["id"]] if "id" in has else [])
        for name, value in attributes:
            self._references.update((value or "").split() if name in REFERENCES else [])
            if name.startswith("aria-") and name[5:] not in ARIA:
                self.faults.append(("aria-valid-attr", name))
        focusable = tag in ("a", "button", "input") and has.get("tabindex") != "-1"
        if has.get("aria-hidden") == "true" and focusable and has.get("type") != "hidden":
            self.faults.append(("aria-hidden-focus", has))
        if tag == "html" and not has.get("lang"):
            self.faults.append(("html-has-lang", has))
        if tag == "img" and "alt" not in has:
            self.faults.append(("image-alt", has))
        if tag == "input" and has.get("type") not in ("hidden", "submit"):
            self._inputs.append(has)
        if re.fullmatch("h[1-6]", tag):
            self._levels.append(int(tag[1]))
        for _, _, texts in self._open:
            texts.append(has.get("alt") or "")
        if tag not in NO_END:
            self._open.append((tag, has, []))

    def handle_data(self, data: str) -> None:
        for _, _, texts in self._open:
            texts.append(data)

    def handle_endtag(self, tag: str) -> None:
        while self._open:
            opened, has, texts = self._open.pop()
            text = "".join([*texts, has.get("aria-label") or has.get("title") or ""]).strip()
            if opened == "title":
                self._title = self._title or text
            elif opened in NAMED and not text and (opened != "a" or "href" in has):
                self.faults.append((NAMED[opened], has))
            if opened == tag:
                break

    def _check(self) -> None:
        self.faults += [("duplicate-id", key) for key, count in self._ids.items() if count > 1]
        self.faults += [("reference", key) for key in self._references - set(self._ids)]
        for has in self._inputs:
            if not has.get("aria-label") and has.get("id") not in self._references:
                self.faults.append(("label", has))
        steps = zip(self._levels, self._levels[1:], strict=False)
        if self._levels.count(1) != 1 or any(after > before + 1 for before, after in steps):
            self.faults.append(("heading-order", self._levels))
        if not self._title:
            self.faults.append(("document-title", ""))


@pytest.mark.parametrize(
    ("html", "rule"),
    [
        ("<p>", "html-has-lang"),
        ("<img src=a>", "image-alt"),
        ("<a href=b> <svg></svg></a>", "link-name"),
        ("<button></button>", "button-name"),
        ("<input id=q>", "label"),
        ("<p id=a></p><p id=a></p>", "duplicate-id"),
        ("<p aria-labelledby=none></p>", "reference"),
        ("<p aria-lable=x></p>", "aria-valid-attr"),
        ("<input aria-label=x aria-hidden=true>", "aria-hidden-focus"),
        ("<h3>Deep</h3>", "heading-order"),
        ("<h1>Second</h1>", "heading-order"),
        ("", "document-title"),
    ],
)
def test_a_fault_of_a_page_is_found(html: str, rule: str) -> None:
    lang = "" if rule == "html-has-lang" else " lang=en"
    title = "" if rule == "document-title" else "<title>T</title>"
    page = Readable(f"<html{lang}>{title}<h1>One</h1>{html}</html>")
    assert [name for name, _ in page.faults] == [rule]
    good = "<img src=a alt=''><a href=b><img src=a alt=A></a><label for=q>Q</label><input id=q>"
    assert Readable(f"<html lang=en><title>T</title><h1>One</h1>{good}").faults == []


@pytest.fixture
def site_tree(tmp_path: Path) -> Path:
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


def build(site_tree: Path) -> subprocess.CompletedProcess[str]:
    return captured([site_tree / "scripts/docs"])


@pytest.mark.long
def test_the_site_has_every_page_and_fails_on_dead_links(site_tree: Path) -> None:
    built = build(site_tree)
    assert built.returncode == 0, built.stderr
    pages = {path.stem for path in (site_tree / "docs").rglob("*.md")}
    assert pages | {"index", "core", "format", "changes"} <= {
        path.stem for path in (site_tree / "site").rglob("*.html")
    }
    faults = {
        page.name: found
        for page in (site_tree / "site").rglob("*.html")
        if (found := Readable(page.read_text()).faults)
    }
    assert faults == {}
    style = (
        site_tree / "site/stylesheets/site.css"
    ).read_text()  # code in tables keeps its words whole
    assert "word-break: normal" in style and "overflow-wrap: normal" in style
    assert "stylesheets/site.css" in (site_tree / "site/reference/commands.html").read_text()
    with (site_tree / "docs/start/concepts.md").open("a") as page:
        page.write("[a](nowhere.md) [b](../use/vllm.md#nothing) [c](../../csrc/gone.c)\n")
    (site_tree / "docs/unlisted.md").write_text("# Nobody leads here\n")
    broken = build(site_tree)
    assert broken.returncode == 1
    for word in ("nowhere.md", "#nothing", "gone.c", "unlisted.md"):
        assert word in broken.stderr
