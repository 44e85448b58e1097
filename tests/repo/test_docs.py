# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The documents are true: commands parse, links resolve, generated parts are fresh, and what they
name exists: metrics, alerts, errors, functions, files.
"""

import ast
import colorsys
import dataclasses
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gen_tables
import pytest
from beluga_bench.harness.recorded import read_record
from support.commands import captured
from support.shown import DOCUMENTS, PAGES, ROOT, blocks, commands, name_of, spans

import beluga
from beluga import errors
from beluga.cli.app import app, cxl_rpc
from beluga.connectors.settings import EngineSettings, PoolSettings, settings_of
from beluga.connectors.vllm.settings import VllmSettings

# ---- The documents are true: commands parse, links resolve, generated parts are fresh.


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
        if shown["kv_connector"] == "OffloadingConnector":
            (shown,) = shown["kv_connector_extra_config"]["secondary_tiers"]
            assert offers(shown.pop("module_path"), shown.pop("type"))
            settings_of(PoolSettings, shown)
            return
        assert shown["kv_connector"] == "BelugaConnector"
        settings_of(VllmSettings, shown.get("kv_connector_extra_config", {}))
    if "--l2-adapter" in words:
        shown = json_after(words, "--l2-adapter")
        assert offers(shown["module_path"], shown["class_name"])
        assert shown["shared"] is True
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
    ["commands_doc", "core_list", "monitoring", "reference", "tables"],
)
def test_generated_documents_are_fresh(script: str) -> None:
    command = [sys.executable, str(ROOT / f"scripts/dev/gen_{script}.py"), "--check"]
    checked = captured(command)
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


# ---- docs/understand/complaints.md names only what exists: each answer can be looked up. So do
# all other pages, where they name metrics, alerts and errors.


PAGE = ROOT / "docs/understand/complaints.md"
CAUSES_AND_VALUES = {"layout", "async"}  # of `beluga explain`, and of the setting `load`
METRICS = "\n".join(
    path.read_text()
    for path in (
        ROOT / "docs/operate/monitoring.md",
        *sorted((ROOT / "beluga/gateway").glob("*.py")),
    )
)
ALERTS = (ROOT / "docs/monitoring/alerts.yml").read_text()


def rows(text: str) -> list[list[str]]:
    """Return the cells of each complaint."""
    found = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in text.splitlines()
        if line.startswith("| ") and not line.startswith(("| ---", "| what users"))
    ]
    return [[*cells, ""][:4] for cells in found]


ROWS = rows(PAGE.read_text())


def exists(span: str) -> bool:  # noqa: PLR0911  a line for each kind of thing that is named
    """Whether everything that a row names in backticks exists."""
    words = span.split()
    if words[0] == "beluga":
        name = found_command(words)
        return name is not None and options_in(words) <= options_of(KNOWN[name])
    if words[0].startswith("scripts/"):
        return script_has(words)
    if words[:2] == ["python", "-m"]:
        return importlib.util.find_spec(words[2]) is not None
    if words[0].startswith("tests/"):
        path, _, function = span.partition("::")
        text = (ROOT / path).read_text() if (ROOT / path).is_file() else ""
        return bool(text) and (not function or f"def {function}(" in text)
    if span.startswith("beluga_"):
        name = span.rstrip("*").removesuffix("_total")  # added by Prometheus's client
        return re.search(rf"\b{re.escape(name)}", METRICS) is not None
    if span.startswith("Beluga"):
        return f"alert: {span}\n" in ALERTS
    if span.endswith("Error"):
        return hasattr(errors, span)
    if span.startswith("KVCache."):
        return hasattr(beluga.KVCache, span.partition(".")[2])
    if span.startswith("--"):  # an option of the command that the row names before it
        return True
    return span in CAUSES_AND_VALUES or span in VllmSettings.__dataclass_fields__


def named(cells: list[str]) -> list[str]:
    return re.findall(r"`([^`]+)`", " ".join(cells[2:]))


def missing(cells: list[str]) -> list[str]:
    """Return what a row names and does not exist."""
    spans = named(cells)
    wrong = [span for span in spans if not exists(span)]
    command = next((span for span in spans if span.startswith("beluga ")), "")
    options = [span for span in spans if span.startswith("--")]
    return wrong + [option for option in options if not exists(f"{command} {option}")]


@pytest.mark.parametrize("cells", ROWS, ids=lambda cells: str(cells[0])[:40])
def test_references_of_a_known_problem_exist(cells: list[str]) -> None:
    assert missing(cells) == []
    answered = not cells[2].startswith("Not addressed")
    assert not answered or any("`" in cell for cell in cells[3:]), "no evidence"
    assert re.search(r"[A-Za-z]#\d+|^LMCache$", cells[1]), "no source"


def test_the_page_has_every_problem_and_wrong_answers_are_detected() -> None:
    assert len(ROWS) >= 30
    assert missing(["", "", "`beluga serve --standby` or `--watch`", "`NoSpaceError`"]) == []
    wrong = (
        "`beluga serve --fast` `beluga_nothing_total` `NoError` `tests/repo/test_docs.py::test_x`"
    )
    assert len(missing(["", "", wrong, "`BelugaFine` `--nothing` `KVCache.fly`"])) == 7


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_metrics_alerts_and_errors_of_a_page_exist(path: Path) -> None:
    kind = re.compile(
        r"beluga_(?!bench)[a-z0-9_]+(?:_total|_seconds|_bytes|_blocks|_ratio)|[A-Z][a-z]\w+Error"
    )
    builtin = {"ValueError", "BelugaError"}
    named = [span for span in spans(path) if kind.fullmatch(span) and span not in builtin]
    assert [span for span in named if not exists(span)] == []
    assert name_of(path) != "docs/operate/troubleshooting.md" or len(named) > 20


# ---- docs/understand/tour.md names files and functions that exist, each function in a file of
# its row.


TOUR = (ROOT / "docs/understand/tour.md").read_text()
TOUR_ROWS = re.findall(r"^\| \d+ \| .* \| (\[.*\)) \| (`.*`) \|$", TOUR, re.MULTILINE)


def has(text: str, name: str) -> bool:
    """Whether this function is defined or declared in a source of Python or C."""
    return re.search(rf"\bdef {name}\(|^\w[\w *]*\b{name}\(", text, re.MULTILINE) is not None


def test_each_row_names_a_function_of_its_files() -> None:
    assert len(TOUR_ROWS) >= 25
    wrong = []
    for files, functions in TOUR_ROWS:
        paths = re.findall(r"\]\(\.\./\.\./([^)]+)\)", files)
        text = "\n".join((ROOT / path).read_text() for path in paths)
        wrong += [
            (paths, name) for name in re.findall(r"`(\w+)`", functions) if not has(text, name)
        ]
    assert wrong == []


def test_functions_in_the_text_exist() -> None:
    named = set(re.findall(r"`(bl_\w+)`", TOUR))
    sources = "\n".join(path.read_text() for path in (ROOT / "csrc").rglob("*.[ch]"))
    assert len(named) >= 20
    assert [name for name in sorted(named) if not has(sources, name)] == []
    assert not has(sources, "bl_kv_fly")


# ---- A recorded result has its origin.


RESULTS = ROOT / "bench/results"


ORIGIN = {"machine", "commit", "date", "command"}
WITHOUT = {
    "before-after.json": {"commit", "command", "date"},  # commits and commands of both builds
    "vllm-disagg.json": ORIGIN,
} | {
    f"{name}.json": {"date"}
    for name in ("copy-cpu-epyc", "indexer", "scheduler", "vllm-bench", "vllm-demo")
}


def test_a_recorded_file_names_machine_commit_day_and_command() -> None:
    """Those in WITHOUT were recorded before results had these fields."""
    lacking = {}
    for path in RESULTS.glob("*.json"):
        content = read_record(path)
        rows = content if isinstance(content, list) else [content]
        if missing := {name for name in ORIGIN for row in rows if not row.get(name)}:
            lacking[path.name] = missing
    assert lacking == WITHOUT


# ---- The figures of the pages are those of the records that they cite.


RECORDS = sorted(RESULTS.glob("*.json"))
UNITS = {
    "ns": (1, 1e9),
    "us": (1e-3, 1e6),
    "ms": (1e-6, 1e3),
    "s": (1e-9, 1, 1e-3),
    "M": (1e-6,),
    "MB": (1e-6, 1e3),
    "%": (1, 100),
    "": (1,),
}
PAGE_OF_STUDIES = "benchmarks.md"  # its sections have records of their own
# Figures of a page outside of generated rows that no record has: what they are instead.
NOT_RECORDED = {
    ("paper.md", "of the paper"): (
        "22.5 7.35 4.79 76.8 8.49 11.32 33.2 3.41 9.47 281.56 166.49 56.2 1.23"
    ),
    ("paper.md", "ratios of two figures of the table"): "1.04 0.94",
    ("benchmarks.md", "sizes, rates and waits that a benchmark sets"): "2.5 0.5 20 30 200 770",
    ("benchmarks.md", "derived from figures of the file"): "44 19 5.2 1.6 .008 .088 5.0 3.2",
    ("benchmarks.md", "of another table, or of the traces"): ".874 77",
    ("benchmarks.md", "probes by hand, as the text says"): (
        "14 76 0.62 40 0.947 1.3 0.4 0.5 6 0.07 0.08 0.05 111 0.88 0.65 6.5 5 13"
    ),
    ("benchmarks.md", "runs outside of the file, as the text says"): (
        "463 457 850 809 828 1.78 1.60 1.79 2.45 6.42 1.99 1.98 2.72 17.5"
    ),
}


def values_of(content: Any) -> Iterator[float]:
    """Yield the numbers of a record, also those in its texts."""
    match content:
        case bool() | None:
            pass
        case int() | float():
            yield float(content)
        case str():
            yield from map(float, re.findall(r"(?<![\w.])\d+(?:\.\d+)?", content))
        case dict():
            for value in content.values():
                yield from values_of(value)
        case list():
            for value in content:
                yield from values_of(value)


def by_hand(table: re.Match[str]) -> str:
    """Return the rows of a table that the generator does not write."""
    lines = table[2].splitlines()
    rows = list(gen_tables.TABLES[table[1]][1]())
    written = set(gen_tables.merged(lines[2:], rows, whole=True))
    return "\n".join(line for line in lines if line not in written) + "\n"


def figures_of(section: str) -> Iterator[tuple[str, str]]:
    """Yield figures and their units, of all but generated rows: those with a decimal or a unit."""
    text = re.sub(r"<!-- figures: (.*?) -->\n\n((?:\|.*\n)+)", by_hand, section)
    text = re.sub(
        r"```.*?```|\]\([^)]*\)|`[^`]*`|[vV]?\d+\.\d+\.\d+[\w.]*", "", text, flags=re.DOTALL
    )
    number = r"(?<![\w.#/-])(\d[\d,]*\.\d+|\.\d+|\d[\d,]*(?=\s(?:ns|us|ms|s|M|MB|%)(?!\w)))"
    for figure, unit in re.findall(number + r"(?:\s(ns|us|ms|s|M|MB|%)(?!\w))?", text):
        yield figure.replace(",", ""), unit


def is_in(figure: str, unit: str, values: set[float]) -> bool:
    digits = len(figure.partition(".")[2])
    shown = float(figure)
    near = {value * scale for value in values for scale in UNITS[unit]}
    if unit == "%":
        near |= {abs(1 - value) * 100 for value in values}
    return any(abs(value - shown) <= 0.5001 * 10**-digits for value in near)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_figures_of_a_page_are_those_of_the_records_that_it_cites(path: Path) -> None:
    known = {
        figure
        for (page, _), figures in NOT_RECORDED.items()
        if page == path.name
        for figure in figures.split()
    }
    wrong = []
    for section in re.split(r"(?m)^(?=##+ )", path.read_text()):
        cited = set(re.findall(r"bench/results/([\w-]+\.json)", section))
        if path.name != PAGE_OF_STUDIES and "routing-results.md" in section:
            cited.add("policies.json")  # that page has all figures of this record
        values = {value for name in cited for value in values_of(read_record(RESULTS / name))}
        for figure, unit in figures_of(section) if cited else ():
            if not is_in(figure, unit, values):
                wrong.append((figure, unit))
    assert [each for each in wrong if each[0] not in known] == []
    assert known <= {figure for figure, _ in wrong}  # those that no longer need an exception


# Records that cannot be repeated, each marked on the pages. There must not be more.
UNREPEATABLE = {
    "hints": "its commit is not in the history",
    "indexer": "of changes that were not committed",
    "tiers-remote": "of changes that were not committed",
    "vllm-disagg": "commit **not known**",
    "vllm-tiers": "of changes that were not committed",
}


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_the_commit_of_a_record_exists_and_is_clean(path: Path) -> None:
    assert path.stem in gen_tables.MEASURES
    if not gen_tables.has_history():
        pytest.skip("not a clone with all commits")
    assert [name for name in gen_tables.MEASURES[path.stem] if not (ROOT / name).exists()] == []
    state = gen_tables.state(path)
    usual = {"of the code as it is", "**older than the code**"}
    assert UNREPEATABLE[path.stem] in state if path.stem in UNREPEATABLE else state in usual


AGES = "benchmarks.md#the-age-of-the-records"


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_a_page_that_cites_a_record_shows_its_age(path: Path) -> None:
    """In a table of its own, or by a link to the table of all records."""
    text = path.read_text()
    cited = set(re.findall(r"bench/results/([\w-]+)\.json", text))
    shown = set(re.findall(r"(?m)^\| \[`([\w-]+)`\]\(\S+\.json\) \|", text))
    assert cited <= shown or AGES in text


# ---- The site can be read: text has the contrast of WCAG AA, which axe checks as "serious".


CODE = "number special function constant keyword string name operator punctuation comment generic"
PAGE, CODE_BOX = "default-bg-color", "code-bg-color"
# Texts, and the background that they have in front of the page's.
CONTRASTS = [
    *(("primary-bg-color", "primary-fg-color"), ("primary-bg-color--light", "primary-fg-color")),
    *((f"code-hl-{kind}-color", CODE_BOX) for kind in [*CODE.split(), "variable"]),
    *((name, CODE_BOX) for name in ("code-fg-color", "typeset-a-color", "accent-fg-color")),
    *((name, PAGE) for name in ("typeset-a-color", "accent-fg-color", "default-fg-color--light")),
    *((f"footer-fg-color{kind}", "footer-bg-color") for kind in ("", "--light", "--lighter")),
]


class Palette:
    """The colors of a scheme, in sRGB with an alpha, each 0 to 1."""

    def __init__(self, css: str, scheme: str) -> None:
        scheme_is, primary_is = f"[data-md-color-scheme={scheme}]", "[data-md-color-primary=teal]"
        selectors = (":root", scheme_is, primary_is, scheme_is + primary_is)
        rules: list[tuple[int, int, str, str]] = []
        for at, rule in enumerate(re.finditer(r"([^{}]*)\{([^{}]*)\}", css)):
            names = re.sub(r"/\*.*?\*/", "", rule[1], flags=re.DOTALL).replace('"', "").split(",")
            for name in {name.strip() for name in names}.intersection(selectors):
                for key, value in re.findall(r"--md-([\w-]+):\s*([^;]+)", rule[2]):
                    rules.append((name.count("["), at, key, value.strip()))
        self._texts = {key: text for _, _, key, text in sorted(rules, key=lambda row: row[:2])}

    def color(self, name: str) -> list[float]:
        text = self._texts[name]
        if alias := re.fullmatch(r"var\(--md-([\w-]+)\)", text):
            return self.color(alias[1])
        if text.startswith("#"):
            digits = text[1:] if len(text) > 5 else "".join(digit * 2 for digit in text[1:])
            return [byte / 255 for byte in bytes.fromhex(digits.ljust(8, "f"))]
        text = text.replace("var(--md-hue)", self._texts["hue"])
        hue, saturation, light, alpha = map(float, re.findall(r"[\d.]+", text))
        red, green, blue = colorsys.hls_to_rgb(hue / 360, light / 100, saturation / 100)
        return [red, green, blue, alpha]

    def contrast(self, text: str, box: str) -> float:
        """Return the contrast ratio of a text in a box on a page, as WCAG 2 defines it."""
        shown = [0.0, 0.0, 0.0]
        luminances = []
        for name in (PAGE, box, text):
            *color, alpha = self.color(name)
            shown = [new * alpha + old * (1 - alpha) for new, old in zip(color, shown, strict=True)]
            linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shown]
            luminances.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
        darker, lighter = sorted(luminances[1:])
        return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_the_colors_of_the_site_have_enough_contrast(scheme: str) -> None:
    material = pytest.importorskip("material", reason="mkdocs-material is not installed")
    themes = Path(material.__file__).parent.glob("templates/assets/stylesheets/*.min.css")
    own = ROOT / "docs/stylesheets/site.css"
    palette = Palette("".join(path.read_text() for path in [*sorted(themes), own]), scheme)
    ratios = {names: palette.contrast(*names) for names in CONTRASTS}
    assert {names: ratio for names, ratio in ratios.items() if ratio < 4.6} == {}
