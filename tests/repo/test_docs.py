# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The documents are true: commands parse, links resolve, generated parts are fresh."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from beluga_bench.harness.recorded import read_record
from support.shown import DOCUMENTS, PAGES, ROOT, blocks, commands, name_of, spans

from beluga import errors
from beluga.cli.app import app, cxl_rpc
from beluga.connectors.settings import EngineSettings, settings_of
from beluga.connectors.vllm.settings import VllmSettings

README_LINES_MAX = 150
PROGRAMS = {"beluga": app, "cxl-rpc": cxl_rpc}
# Programs of other projects; only our part of their arguments is checked.
OTHERS = {"pip", "echo", "curl", "kill", "rm", "vllm", "lmcache", "python"}


KNOWN = {
    " ".join((name, *words)): program.at(words)
    for name, program in PROGRAMS.items()
    for words in program.leaves()
}


def found_command(words: list[str]) -> str | None:
    """Return the longest prefix of ``words`` that is a command."""
    return next((name for n in (3, 2) if (name := " ".join(words[:n])) in KNOWN), None)


def options_of(command: Any) -> set[str]:
    return {"--help"} | {o for p in command.params for o in (*p.opts, *p.secondary_opts)}


def options_in(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if re.match(r"--\w", word)}


def script_has(words: list[str]) -> bool:
    """Whether the script exists, and it or a program that it starts has these options."""
    script = ROOT / words[0]
    if not script.is_file():
        return False
    started = re.findall(r"beluga_bench\.(\w+)\.(\w+)|tests/([\w/]+\.py)", script.read_text())
    files = [script]
    files += [ROOT / "bench" / folder / f"{name}.py" for folder, name, _ in started if name]
    files += [ROOT / "tests" / path for _, _, path in started if path]
    text = "\n".join(path.read_text() for path in files if path.exists())
    return all(option in text for option in options_in(words))


def json_after(words: list[str], option: str) -> dict[str, Any]:
    value = json.loads(words[words.index(option) + 1])
    assert isinstance(value, dict)
    return value


def offers(module: str, name: str) -> bool:
    """Whether a package has a class of this name. It is not imported, because its engine may be
    missing.
    """
    spec = importlib.util.find_spec(module)
    return spec is not None and name in Path(spec.origin or "").read_text()


def check_plugin(words: list[str]) -> None:
    """Check that Beluga's connector accepts the settings of an engine for Beluga."""
    if "--kv-transfer-config" in words:
        shown = json_after(words, "--kv-transfer-config")
        if shown["kv_connector"] == "MultiConnector":
            children = shown["kv_connector_extra_config"]["connectors"]
            (shown,) = [child for child in children if child["kv_connector"] == "BelugaConnector"]
        assert shown["kv_connector"] == "BelugaConnector"
        settings_of(VllmSettings, shown.get("kv_connector_extra_config", {}))
    if "--l2-adapter" in words:
        shown = json_after(words, "--l2-adapter")
        assert offers(shown["module_path"], shown["class_name"])
        settings_of(EngineSettings, shown["adapter_params"])
    if "--hicache-storage-backend-extra-config" in words:
        shown = json_after(words, "--hicache-storage-backend-extra-config")
        assert offers(shown.pop("module_path"), shown.pop("class_name"))
        settings_of(
            EngineSettings, {k: shown[k] for k in shown.keys() - {"backend_name", "interface_v1"}}
        )


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_shown_commands_parse(path: Path) -> None:
    """With the parser of the command; scripts and engines with the options known here."""
    for block in blocks(path):
        for shown in commands(block):
            words = shown.words
            if words[0] in PROGRAMS:
                name = found_command(words)
                assert name is not None, shown.line
                KNOWN[name].make_context(name, words[len(name.split()) :])  # raises UsageError
            elif words[0].startswith("scripts/"):
                assert script_has(words), shown.line
            else:
                assert words[0] in OTHERS, shown.line
                check_plugin(words)


def test_tests_readme_names_files_that_exist() -> None:
    """In the first column; a name without a folder lies in the folder of the name before it."""
    wrong = []
    for row in (ROOT / "tests/README.md").read_text().splitlines():
        folder = ""
        for name in re.findall(r"`([\w/]+\.(?:py|json))`", row.partition(" | ")[0]):
            place = name if "/" in name or (ROOT / "tests" / name).exists() else folder + name
            folder = place.rpartition("/")[0] + "/" if "/" in place else ""
            if not (ROOT / "tests" / place).exists():
                wrong.append(name)
    assert wrong == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_commands_of_shell_blocks_parse(path: Path) -> None:
    """Blocks that are pasted have no prompt; names in capitals stand for values."""
    for block in blocks(path):
        if block.language != "shell":
            continue
        text = re.sub(r"\\\n\s*", " ", block.text)
        for line in re.split(r"\n|&&|\|\|", text):
            words = shlex.split(line, comments=True)
            if words and (program := words[0].rpartition("/")[2]) in PROGRAMS:
                words[0] = program
                name = found_command(words)
                assert name is not None, line
                KNOWN[name].make_context(name, words[len(name.split()) :])


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_commands_in_the_text_exist(path: Path) -> None:
    """Placeholders stand in them, so only names and options can be checked."""
    wrong = []
    for span in spans(path):
        words = span.split()
        if words[0].startswith("scripts/") and not words[0].endswith(".py"):
            if not script_has(words):
                wrong.append(span)
        elif words[0] in PROGRAMS and len(words) > 1 and re.match(r"[a-z]", words[1]):
            name = found_command(words) or ""
            groups = {" ".join(known.split()[:2]) for known in KNOWN}
            known = options_of(KNOWN[name]) if name else set()
            if (not name and span not in groups) or (name and options_in(words) - known):
                wrong.append(span)
    assert wrong == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_relative_links_resolve(path: Path) -> None:
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", path.read_text())
    wrong = [
        link
        for link in links
        if not re.match(r"[a-z]+:", link) and not (path.parent / link).exists()
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "script",
    [
        "gen_commands_doc.py",
        "gen_core_list.py",
        "gen_monitoring.py",
        "gen_reference.py",
        "gen_tables.py",
    ],
)
def test_generated_documents_are_fresh(script: str) -> None:
    command = [sys.executable, str(ROOT / "scripts/dev" / script), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_every_group_of_metrics_has_a_panel() -> None:
    """The metrics of handlers, of shares and of hints had none."""
    page = (ROOT / "docs/operate/monitoring.md").read_text()
    names = re.findall(r"^\| `(beluga_[a-z_]+)` \|", page, re.MULTILINE)
    dashboard = (ROOT / "docs/monitoring/dashboard.json").read_text()
    groups = {re.sub(r"^(beluga_[a-z]+?)s?(_.*)?$", r"\1", name) for name in names}
    assert len(groups) > 20
    shown = set(re.findall(r"\b(beluga_[a-z_]+)", dashboard))
    lacking = {group for group in groups if not any(name.startswith(group) for name in shown)}
    assert lacking == set()


# Options of other programs that error messages and advice name.
OTHERS_OPTIONS = {
    *("--align", "--mode", "--shm-size", "--size", "--kv-transfer-config"),
    *("--prefix-caching-hash-algo", "--enable-prefix-caching"),
    *("--revision", "--code-revision"),
}


def error_messages() -> Iterator[str]:
    """Yield the texts of the errors that are raised, with … for the parts that differ."""
    yield from (text for _, text in errors.CODES)
    for path in sorted((ROOT / "beluga").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "id", "")
                if name.endswith("Error") and hasattr(errors, name):
                    yield text_of(node.args[0])


def text_of(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return "…"


def test_commands_in_the_advice_of_errors_exist() -> None:
    text = "\n".join([(ROOT / "docs/reference/errors.md").read_text(), *error_messages()])
    options = {option for command in KNOWN.values() for option in options_of(command)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    assert len(named) > 20
    assert named - options - OTHERS_OPTIONS == set()
    named_commands = re.findall(r"'beluga ([a-z][a-z -]*)", text)
    assert len(named_commands) > 20
    assert [
        words for words in named_commands if not found_command(["beluga", *words.split()])
    ] == []


def test_every_c_file_is_listed() -> None:
    text = (ROOT / "csrc/README.md").read_text()
    files = [
        path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".c", ".h", ".cu", ".cuh")
    ]
    assert len(files) > 100
    assert [path for path in files if f"]({path.relative_to(ROOT / 'csrc')})" not in text] == []


def test_the_readme_is_short_and_links_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= README_LINES_MAX
    pages = PAGES[1:]
    assert len(pages) >= 15
    assert [name_of(path) for path in pages if f"]({name_of(path)})" not in text] == []


def test_every_decision_that_the_code_cites_is_explained() -> None:
    explained = re.findall(
        r"^### (D\d+)\. ", (ROOT / "docs/understand/design.md").read_text(), re.MULTILINE
    )
    assert explained == [f"D{number}" for number in range(1, len(explained) + 1)]
    cited = {
        decision
        for folder in ("csrc", "beluga", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".c", ".h", ".py") and path.name != "_core.c"
        for decision in re.findall(r"\b(D[1-9]\d?)\b(?=[),;])", path.read_text())
    }
    assert len(cited) > 10
    assert cited - set(explained) == set()


def test_the_settings_of_connectors_are_all_described() -> None:
    text = (ROOT / "docs/use/vllm.md").read_text()
    described = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(described) == sorted(field.name for field in dataclasses.fields(VllmSettings))


def test_the_glossary_has_each_word_once() -> None:
    text = (ROOT / "docs/reference/glossary.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", text, re.MULTILINE)
    words = [word for row in rows if row not in ("word", "---") for word in row.split(", ")]
    assert len(words) > 60
    assert sorted(words) == sorted(set(words))


# The README's figures for routing: trace, load, memory, policies, and seconds.
IGNORES_CACHES = {"least-tokens", "two-choices", "round-robin", "random"}


def best(trace: str, load: float, memory: str, policies: set[str] | None = None) -> str:
    """Return the least mean time to first token of the recorded simulations, as a text."""
    rows = read_record(ROOT / "bench/results/policies.json")["rows"]
    found = [
        row["ttft_mean_s"]
        for row in rows
        if (row["trace"], row["load"], row["memory"]) == (trace, load, memory)
        and (policies is None or row["policy"] in policies)
    ]
    return f"{min(found):.2f}"


def test_the_readme_has_the_measured_effect_of_ignoring_caches() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    conversations, sessions = "conversation_trace", "weka"
    for trace, load in ((conversations, 1), (sessions, 1), (conversations, 1.2)):
        ignoring = best(trace, load, "pool", IGNORES_CACHES)
        split = best(trace, load, "split")
        assert re.search(rf"\b{ignoring} s (on the pool )?against {split} s\b", text), (trace, load)
        assert best(trace, load, "pool", {"least-cost"}) in text
    assert best(conversations, 1, "pool", IGNORES_CACHES) > best(conversations, 1, "split")
    assert best(sessions, 1, "pool", IGNORES_CACHES) > best(sessions, 1, "split")
    assert "does not beat the best policy on split memory" in text


def test_experiments_have_the_numbers_of_the_paper() -> None:
    """In the titles of docs/understand/paper.md, in the table of benchmarks, and where code names
    an experiment.
    """
    titles = re.findall(
        r"^### (Exp .*)$", (ROOT / "docs/understand/paper.md").read_text(), re.MULTILINE
    )
    about = {
        1: "methods to write", 2: "latency", 3: "skewed", 4: "background load", 5: "hits it",
        6: "rates", 7: "lengths", 8: "settings", 9: "dense", 10: "sparse", 11: "calls",
    }  # fmt: skip
    shown = " ".join(titles)
    assert [int(n) for n in re.findall(r"Exp (\d+)", shown)] == sorted(about)
    for number, words in about.items():
        assert re.search(rf"Exp {number}: [^E]*{words}", shown), number
    cited = {
        "bench/paper/latency.py": {2}, "bench/paper/bandwidth.py": {3, 4},
        "bench/vllm/load.py": {5, 6}, "bench/vllm/variants.py": {8},
        "bench/paper/copy.py": {9, 10}, "bench/paper/rpc.py": {11},
    }  # fmt: skip
    for path, numbers in cited.items():
        text = " ".join((ROOT / path).read_text().partition('"""\n\n')[0].split())
        matches = re.findall(r"\bExp ?(\d+)(?:,? and (?:Exp )?(\d+))?", text)
        assert {int(n) for pair in matches for n in pair if n} == numbers, path
    rows = (ROOT / "docs/understand/benchmarks.md").read_text()
    assert "| `copy` (Exp 9, 10) |" in rows and "| `bandwidth` (Exp 3, 4, Fig. 6) |" in rows


def test_documents_agree_with_the_code_and_cite_files_that_exist() -> None:
    assumed = set(re.findall(r"\bA(\d)\b", (ROOT / "csrc/coherence/coherence.h").read_text()))
    shown = re.search(r"\(A1 to A(\d) in", (ROOT / "docs/understand/correctness.md").read_text())
    assert shown and shown[1] == max(assumed)
    sources = [path for name in ("beluga", "bench", "csrc") for path in (ROOT / name).rglob("*")]
    texts = [path for path in sources if path.suffix in (".py", ".c", ".h", ".cu", ".cuh")]
    pages = {path.name for path in DOCUMENTS}
    cited = {
        (path.name, name)
        for path in texts
        for name in re.findall(r"\b([a-z][\w-]*\.md)\b", path.read_text())
        if name != "kv-events-custom-engines.md"  # Dynamo's
    }
    assert len(cited) > 3
    assert {(path, name) for path, name in cited if name not in pages} == set()


def test_the_readme_names_what_is_out_of_scope() -> None:
    for page in ("README.md", "docs/understand/comparison.md"):
        text = " ".join((ROOT / page).read_text().split())
        part = text[text.index("Out of scope") :]
        for word in ("cost", "switch", "directory coherence", "vector and graph databases",
                     "CacheBlend", "CacheGen", "encryption at rest"):  # fmt: skip
            assert word in part, (page, word)
