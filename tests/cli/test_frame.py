# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The frame of the programs: help, legends, completion, what is imported, what texts name."""

import ast
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import beluga_bench
import click
import pytest
from click.testing import CliRunner

import beluga.cli
from beluga import choices, router, simulate
from beluga.cli import output, trace
from beluga.cli.app import app, cxl_rpc
from beluga.cli.frame import Legend, legends_of
from beluga.router import POLICIES, costs
from beluga.rpc import method_names
from beluga.simulate import ENGINES, MEMORIES, ORDERS

PROGRAMS = {"beluga": app, "cxl-rpc": cxl_rpc}
LEAVES = [(name, words) for name, program in PROGRAMS.items() for words in [(), *program.leaves()]]


def help_of(name: str, words: tuple[str, ...]) -> str:
    shown = CliRunner().invoke(PROGRAMS[name], [*words, "--help"], prog_name=name)
    assert shown.exit_code == 0
    return shown.stdout


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize(("name", "words"), LEAVES, ids=str)
def test_help_fits_and_names_every_option_in_full(
    name: str, words: tuple[str, ...], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = help_of(name, words)
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    assert len(re.findall(r"(?im)^[\w ]*arguments:$", text)) <= 1
    command: Any = PROGRAMS[name].at(words)
    for option in command.params:
        if option.param_type_name == "option" and not option.hidden:
            for opt in (*option.opts, *option.secondary_opts):
                assert re.search(rf"(?<![\w-]){opt}(?![\w-])", text), opt


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("command", ["gateway", "simulate", "size"])
def test_help_cuts_no_value(command: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = help_of("beluga", (command,))
    for value in costs.MODELS:
        assert value in text


@pytest.mark.parametrize("columns", [40, 60])
def test_help_in_a_pipe_respects_columns(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    legend = output.Legend({"name": "a name", "where it is, if anywhere": "a place"})
    row = ["x" * 50, "a place of some length"]
    monkeypatch.setenv("COLUMNS", str(columns))
    output.print_table(legend, [row])
    output.print_facts({"a name of some length, which is longer than a line is": 1})
    output.print_row(" ".join(["word"] * 20))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert "…" not in "".join(lines)
    assert "".join(lines).count("x") == 50
    monkeypatch.delenv("COLUMNS")
    output.print_table(legend, [row])
    assert max(map(len, capsys.readouterr().out.splitlines())) > columns


def test_the_columns_of_a_trace_are_as_wide_as_their_values() -> None:
    for method in method_names():
        row = trace._ROW.format(
            "03:31:40.353149", "63:4194304:999", method, 4096, "99,999.9", 1, ""
        )
        assert row.index(method) == trace._HEADING.index("method")
        assert len(row.rstrip() + " unfinished") <= 80


FOLDER = Path(beluga.cli.__file__).parent


def commands() -> Iterator[tuple[str, Any, tuple[Legend, ...]]]:
    """Yield the name of each command, its program, and the legends of its tables."""
    for name, program in PROGRAMS.items():
        root: Any = program
        for words in root.leaves():
            legends = legends_of(root.at(words).callback)
            yield " ".join((name, *words)), program, legends


def test_every_legend_belongs_to_a_command() -> None:
    """A table cannot be printed without a legend; a legend without a command explains nothing."""
    shown = [legend for *_, legends in commands() for legend in legends]
    for module in pkgutil.iter_modules([str(FOLDER)]):
        for name, value in vars(import_module(f"beluga.cli.{module.name}")).items():
            if isinstance(value, Legend):
                assert any(value is legend for legend in shown), f"{module.name}.{name}"
                assert all(len(text.split()) > 1 for text in value.values()), name


def test_legends_are_defined_apart_from_printing() -> None:
    """They are the module's, where the test above finds them."""
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print_table":
                assert isinstance(node.args[0], ast.Name), f"{path.name}:{node.lineno}"
                assert node.args[0].id.isupper() or path.name == "block.py", path.name


@pytest.mark.parametrize("name", [name for name, _, legends in commands() if legends])
def test_the_help_explains_each_column(name: str) -> None:
    program, *words = name.split()
    legends = next(tables for command, _, tables in commands() if command == name)
    text = CliRunner().invoke(PROGRAMS[program], [*words, "--help"]).stdout
    shown = " ".join(text.split())
    for legend in legends:
        for column, meaning in legend.items():
            assert re.sub(r"\s+", " ", f"{column}: {meaning}") in shown


def completed(words: tuple[str, ...], option: str, incomplete: str = "") -> list[str]:
    command: Any = app.at(words)
    (parameter,) = [param for param in command.params if option in (*param.opts, param.name)]
    ctx = click.Context(command, resilient_parsing=True)
    return [item.value for item in parameter.shell_complete(ctx, incomplete)]


@pytest.mark.parametrize(
    ("words", "option", "values"),
    [
        (("simulate",), "--policy", {*POLICIES, "default", "list"}),
        (("simulate",), "--eviction", set(ORDERS)),
        (("simulate",), "--memory", {*MEMORIES, "both"}),
        (("simulate",), "--engine", set(ENGINES)),
        (("gateway",), "--policy", {*POLICIES, "default", "list"}),
        (("gateway",), "--gpu-path", {"root-complex", "switch"}),
        (("serve",), "--eviction", {"lru", "s3fifo"}),
        (("bench",), "names", {*beluga_bench.BENCHES, "all", "report"}),
        (("verify",), "--role", {"a", "b"}),
    ],
)
def test_values_are_completed(words: tuple[str, ...], option: str, values: set[str]) -> None:
    assert set(completed(words, option)) == values
    value = max(values)
    assert value in completed(words, option, value[:-1])
    assert completed(words, option, "nothing") == []


def test_the_last_of_several_values_is_completed() -> None:
    assert completed(("simulate",), "--policy", "random,lin") == ["random,linear"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_option_that_lists_its_words_completes_them(name: str) -> None:
    """``--offload wait|drop``: the shell completes the values that the help shows between bars."""
    root: Any = PROGRAMS[name]
    lacking = []
    for words in root.leaves():
        command = root.at(words)
        ctx = click.Context(command, resilient_parsing=True)
        for param in command.params:
            shown = str(param.metavar or "")
            if "|" not in shown:
                continue
            values = {item.value for item in param.shell_complete(ctx, "")}
            if values != set(shown.split("|")):
                lacking.append(f"{' '.join(words)} {param.opts[0]}: {shown}")
    assert lacking == []


ROOT = Path(__file__).resolve().parent.parent.parent
RECORDED = """
import atexit, json, os, sys
record = lambda: [*sys.modules, f"threads: {{len(os.listdir('/proc/self/task'))}}"]
atexit.register(lambda: json.dump(record(), open({path!r}, "w")))
from beluga.cli.main import main
sys.argv = ["beluga", *{arguments!r}]
main()
"""
ROOTS = [pytest.param(app, id="beluga"), pytest.param(cxl_rpc, id="cxl-rpc")]
# Modules of commands, and what else a command should not wait for.
COMMANDS = {f"beluga.cli.{name}" for name in ("block", "bench", "pool", "ping", "serve", "stat")}
SLOW = COMMANDS | {f"beluga.{name}" for name in ("tiers", "transfer", "router", "simulate")}
Loaded = Callable[..., set[str]]


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    """Runs ``beluga`` and returns the modules that it has imported when it ends, and ``threads: N``
    for the number of its threads.
    """

    def run(*arguments: str, settings: str = "", **environment: str) -> set[str]:
        path, file = tmp_path / "modules", tmp_path / "beluga.toml"
        file.write_text(settings)
        subprocess.run(
            [sys.executable, "-c", RECORDED.format(path=str(path), arguments=arguments)],
            cwd=ROOT,
            env=os.environ | {"BELUGA_CONFIG": str(file)} | environment,
            capture_output=True,
            check=False,
        )
        return set(json.loads(path.read_text()))

    return run


@pytest.mark.parametrize("words", [("--help",), ("pool", "--help"), ("--version",)])
def test_the_help_of_a_group_imports_no_core(loaded: Loaded, words: tuple[str, ...]) -> None:
    """numpy alone takes as long as all the rest of it."""
    heavy = {"numpy", "rich", "beluga._ffi", "beluga.pool"}
    assert not loaded(*words) & ((SLOW - COMMANDS) | heavy)


MODULES_MAX = 250  # Python 3.11 needs 150


@pytest.mark.parametrize("words", list(app.leaves()))
def test_the_help_of_a_command_imports_neither_numpy_nor_the_core(
    loaded: Loaded, words: tuple[str, ...]
) -> None:
    """Modules are counted, because the time of a start depends on the machine."""
    modules = loaded(*words, "--help")
    assert "click" in modules
    assert not modules & {"numpy", "rich", "beluga._ffi", "beluga.pool", "beluga_bench"}
    assert len(modules) < MODULES_MAX


def test_choices_in_help_match_the_modules_that_implement_them() -> None:
    assert choices.PREFILL_RULES == router.RULES
    assert choices.BLOCK_TOKENS_MAX == router.BlockHasher.BLOCK_SIZE_MAX
    assert (choices.RANKS, choices.RANKS_MAX) == (
        router.Indexer.WORKERS,
        router.Indexer.WORKERS_MOST,
    )
    assert tuple(router.costs.MODELS) == choices.COST_MODELS
    assert choices.DEFAULT_COST_MODEL == router.costs.DEFAULT_MODEL
    assert {name: speed * 1e9 for name, speed in choices.GPU_PATHS_GB_PER_S.items()} == (
        router.costs.GPU_PATHS
    )
    assert choices.LOCAL_DRAM_GB_PER_S * 1e9 == router.costs.LOCAL_DRAM
    assert choices.STEP_TOKENS == router.costs.STEP_TOKENS
    assert tuple(simulate.ORDERS) == choices.TIER_ORDERS
    assert tuple(simulate.PRESETS) == choices.PRESETS
    assert choices.TRACE_FORMATS == simulate.FORMATS
    assert tuple(simulate.TIME_UNITS) == choices.TIME_UNITS
    assert tuple(beluga_bench.BENCHES) == choices.BENCHES


def test_completion_imports_no_core(loaded: Loaded) -> None:
    environment = {
        "_BELUGA_COMPLETE": "bash_complete",
        "COMP_WORDS": "beluga st",
        "COMP_CWORD": "1",
    }
    assert not loaded(**environment) & (SLOW - COMMANDS)


@pytest.mark.parametrize("command", ["ping", "stat"])
def test_a_command_imports_its_own_module(
    loaded: Loaded, server: object, pool: list[str], command: str
) -> None:
    """A host for all commands in beluga.toml does not change that."""
    modules = loaded(command, *pool, "--json", settings="host = 0")
    assert modules & SLOW == {f"beluga.cli.{command}"}
    assert "rich" not in modules  # JSON needs no tables


@pytest.mark.parametrize("command", ["ping", "put", "get"])
def test_a_command_on_one_block_starts_with_few_imports(
    loaded: Loaded, server: object, pool: list[str], tmp_path: Path, command: str
) -> None:
    """The modules that take longest to import, and that no result on stderr needs."""
    (tmp_path / "block").write_text("text")
    words = {"ping": [], "put": ["key", str(tmp_path / "block")], "get": ["key"]}[command]
    modules = loaded(command, *words, *pool)
    assert "beluga.rpc" in modules
    unneeded = {"rich", "msgspec", "asyncio", "concurrent.futures", "shutil", "beluga.cli.stat"}
    unneeded |= {"beluga.transfer.cuda", "ssl", "importlib.metadata", "logging.config"}
    unneeded |= {"http", "email", "subprocess", "tempfile", "multiprocessing", "beluga.tiers"}
    if command == "ping":
        unneeded |= {"numpy", "beluga.index", "beluga.transfer"}
    assert not modules & unneeded
    assert "threads: 1" in modules  # numpy has started none for linear algebra


@pytest.mark.parametrize("program", ROOTS)
def test_the_help_of_a_group_lists_its_commands(program: Any) -> None:
    shown = " ".join(CliRunner().invoke(program, ["--help"]).stdout.split())
    for words in program.leaves():
        assert program.at(words).help
        if len(words) == 1:
            text = program.at(words).help.partition("\n\n")[0]
            assert f"{words[0]} {' '.join(text.split())}" in shown


@pytest.mark.parametrize("program", ROOTS)
def test_command_names_resolve_to_their_modules(program: Any) -> None:
    root: Any = program
    leaves = list(root.leaves())
    assert len(leaves) == len(set(leaves)) > 3
    for words in leaves:
        command = root.at(words)
        assert (command.name, hasattr(command, "commands")) == (words[-1], False)


# Options of other programs that our texts name: engines, pip, docker, daxctl, accel-config, the
# CUDA compiler.
OF_OTHERS = {
    *("--kv-events-config", "--max-num-batched-tokens", "--enable-metrics", "--shm-size"),
    *("--enable-prefix-caching", "--prefix-caching-hash-algo", "--force-reinstall", "--align"),
    *("--mode", "--type", "--driver-name", "--group-id", "--wq-size", "--threshold", "--std"),
    *("--max-batch-size", "--priority", "--code-revision", "--revision"),
}
VERBS = {  # "beluga needs ..."
    *("can", "cannot", "does", "finds", "for", "has", "knows", "needs", "serves", "stores"),
}
GENERATED = {"_core.c", "html.py"}  # the last one has CSS, whose variables begin with --
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?!-)")
# A command, its options and the values of these, up to the end of the quotation or of the part.
SHOWN = re.compile(r"(?<![\w./-])(beluga|cxl-rpc) ([a-z][a-z-]*)(?: ([a-z]+))?([^'`\",;:()]*)")


def options_by_command() -> dict[tuple[str, ...], set[str]]:
    """Return the options of each command by its words; groups and programs have none."""
    by_command: dict[tuple[str, ...], set[str]] = {}
    for name, program in PROGRAMS.items():
        root: Any = program
        by_command[name,] = options_of(root)
        for leaf in root.leaves():
            by_command[(name, *leaf)] = options_of(root.at(leaf))
            by_command.setdefault((name, leaf[0]), set())
    return by_command


def options_of(command: Any) -> set[str]:
    return {text for param in command.params for text in (*param.opts, *param.secondary_opts)}


def files() -> Iterator[Path]:
    for path in (*(ROOT / "beluga").rglob("*.py"), *(ROOT / "csrc").rglob("*.[ch]")):
        if path.name not in GENERATED:
            yield path


def texts(path: Path) -> Iterator[str]:
    """Yield the texts in a source file, but not its comments and docstrings. What differs in an
    f-string is {}.
    """
    source = path.read_text()
    if path.suffix != ".py":
        code = re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL)
        yield from re.findall(r'"((?:[^"\\\n]|\\.)*)"', code)
        return
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if path.parent.name != "cli":  # where docstrings are the help of options
                skipped.add(id(node.value))  # a docstring
        elif isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in skipped
        ):
            yield node.value


def test_options_that_are_named_exist() -> None:
    options = set().union(*options_by_command().values(), {"--help"})
    named = {
        option: path for path in files() for text in texts(path) for option in OPTION.findall(text)
    }
    assert len(named) > 30
    assert {
        option: path.name for option, path in named.items() if option not in options | OF_OTHERS
    } == {}
    assert OF_OTHERS - named.keys() == set(), "no text names these any more"


def test_commands_that_are_named_exist_and_have_the_options() -> None:
    commands, wrong, count = options_by_command(), [], 0
    for path in files():
        for text in texts(path):
            for program, first, second, following in SHOWN.findall(text):
                if first in VERBS:
                    continue
                count += 1
                words = (program, first)
                if (*words, second) in commands:
                    words = (*words, second)
                if words not in commands or set(OPTION.findall(following)) - commands[words]:
                    wrong.append(f"{path.name}: {program} {first} {second}{following}")
    assert count > 20
    assert wrong == []
