# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Tests the fast tests: draws mutants of ``beluga/`` or ``csrc/`` and runs the tests on each.

A mutant of Python is tried with the tests that run its line (found by a first run under
``coverage``; a default or a constant with those that run its file), at most ``TESTS_MAX`` of them;
one of C with the folders that ``FOLDERS`` names for it. Works on a copy of the tree, so no file of
the checkout is changed. Prints the mutants that no test detected: each is a missing test, or
changes nothing (check, and record it), or is a needless line.
"""

import argparse
import ast
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import c_mutants
import python_mutants
from python_mutants import Mutant

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TESTS_MAX = 400

# The folders or files of tests/ for a package, in the order of their runs.
FOLDERS: dict[str, str] = {
    "cli": "cli replay",
    "connectors": "connectors",
    "disagg": "disagg gateway/test_prefill_apart.py",
    "gateway": "gateway",
    "kvcache": "kvcache",
    "index": "index kvcache/test_cache.py",
    "pool": "pool cli/test_pool_command.py rpc/test_files.py",
    "coherence": "coherence",
    "replay": "replay",
    "router": "router gateway",
    "rpc": "rpc index/test_operate.py crash/test_kills.py cli/test_serve_command.py",
    "simulate": "simulate cli/test_simulate_command.py",
    "transfer": "transfer kvcache",
    "verify": "verify cli/test_verify_command.py sim/test_device_agent.py",
}
# The same for C, by a prefix of a file's path in csrc/; the longest prefix counts.
C_FOLDERS: dict[str, str] = {
    "base": "index models",
    "check": "index/test_check.py cli",
    "coherence": "coherence transfer/test_cpu_engine.py",
    "coherence/crash_point": "crash kvcache",
    "coherence/guard": "crash kvcache",
    "coherence/wait": "rpc index crash sim",
    "dsa": "transfer kvcache",
    "format/interleave": "pool",
    "format/line": "rpc index crash sim",
    "index": "index models kvcache sim/test_paths.py crash",
    "iosched": "transfer kvcache/test_linked.py",
    "kvcache": "kvcache hostile",
    "liveness": "rpc index crash sim",
    "pool": "rpc index crash sim",
    "pool/pool": "pool",
    "pool/superblock": "pool",
    "prefix": "router models",
    "rpc": "rpc index crash sim",
    "space": "index models kvcache sim/test_paths.py crash",
    "transfer": "transfer kvcache",
    "verify": "cli/test_verify_command.py sim/test_device_agent.py",
}


@dataclass(frozen=True)
class Verdict:
    """The result of a mutant: caught, survived, or does not compile."""

    mutant: Mutant
    caught: bool
    how: str


class Copy:
    """A copy of the tree with its own environment, in which files may be changed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        skip = shutil.ignore_patterns(
            ".git", ".venv*", "build", "__pycache__", ".hypothesis", ".mypy_cache", ".pytest_cache"
        )
        shutil.copytree(ROOT, root, ignore=skip, dirs_exist_ok=True)
        # The project's environment has an editable install, which this overrides.
        path = os.pathsep.join([str(root), str(root / "tests")])
        self.environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        bench = root / "beluga_bench"
        if not bench.exists():
            bench.symlink_to("bench")

    def pytest(self, *arguments: str, timeout_s: float = 1800) -> tuple[int, str]:
        """Return the exit status and the output; -9 if it did not end in time."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [*command, *arguments],
                cwd=self.root,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return -9, "timeout"
        return done.returncode, done.stdout

    def coverage(self, package: str, tests: list[str]) -> dict[tuple[str, int], list[str]]:
        """Return the tests that run each line, by file and line."""
        data = self.root / "build" / f"coverage-{package}"
        data.parent.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "coverage", "run", "--rcfile="]
        command += [f"--data-file={data}", f"--source={self.root}/beluga/{package}"]
        command += ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "contexts", *tests]
        path = os.pathsep.join([self.environment["PYTHONPATH"], str(HERE)])
        done = subprocess.run(
            command,
            cwd=self.root,
            env={**self.environment, "PYTHONPATH": path, "COVERAGE_CORE": "ctrace"},
            capture_output=True,
            text=True,
            check=False,
        )
        print(done.stdout.strip().splitlines()[-1], file=sys.stderr)
        return covered(data, self.root)

    def build(self) -> bool:
        """Compile the C core; False where it does not."""
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        environment = {**self.environment, "CFLAGS": "-O1"}
        done = subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, check=False
        )
        return done.returncode == 0


def covered(data: Path, root: Path) -> dict[tuple[str, int], list[str]]:
    """Read coverage's data: the test ids by file and line."""
    from coverage.numbits import numbits_to_nums

    found: dict[tuple[str, int], list[str]] = {}
    with sqlite3.connect(data) as base:
        rows = base.execute(
            "select file.path, context.context, line_bits.numbits from line_bits"
            " join file on file.id = line_bits.file_id"
            " join context on context.id = line_bits.context_id where context.context != ''"
        )
        for path, context, bits in rows:
            name = str(Path(path).relative_to(root))
            for line in numbits_to_nums(bits):
                found.setdefault((name, line), []).append(context)
    return found


def python_files(package: str) -> list[Path]:
    """Return the files of a package of beluga/, or the single file of that name."""
    folder = ROOT / "beluga" / package
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    return [path.relative_to(ROOT) for path in files]


def c_folders(path: Path) -> list[str]:
    """Return the tests of a C file."""
    name = str(path).rpartition("csrc/")[2]
    fit = [(len(word), folders) for word, folders in C_FOLDERS.items() if name.startswith(word)]
    return [f"tests/{name}" for name in max(fit)[1].split()] if fit else []


def c_files() -> list[Path]:
    """Return the C files of the product that have logic."""
    skip = ("sim", "coherence.h", "pool_format")
    files = [path for path in (ROOT / "csrc").rglob("*.[ch]") if not path.name.startswith(skip)]
    return [path.relative_to(ROOT) for path in sorted(files) if c_folders(path)]


def try_python(copy: Copy, mutant: Mutant, tests: list[str]) -> Verdict:
    """Run tests on one mutant of Python."""
    path = copy.root / mutant.path
    source = path.read_text()
    path.write_text(mutant.apply(source))
    try:
        status, output = copy.pytest("--timeout=60", *tests, timeout_s=900)
    finally:
        path.write_text(source)
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return Verdict(mutant, status not in (0, 5), failed[0][:150] if failed else str(status))


def try_c(copy: Copy, mutant: Mutant, tests: list[str]) -> Verdict | None:
    """Run tests on one mutant of C. Returns None if it does not compile."""
    path = copy.root / mutant.path
    source = path.read_text()
    path.write_text(mutant.apply(source))
    try:
        if not copy.build():
            return None
        for test in tests:
            status, output = copy.pytest("--timeout=60", test, timeout_s=900)
            if status not in (0, 5):
                failed = [x for x in output.splitlines() if x.startswith(("FAILED", "ERROR"))]
                return Verdict(mutant, True, failed[0][:150] if failed else f"{test}: {status}")
    finally:
        path.write_text(source)
    return Verdict(mutant, False, "")


def runs_at_import(mutant: Mutant) -> bool:
    """Whether it is outside of every function's body, such as a default or a constant."""
    tree = ast.parse((ROOT / mutant.path).read_text())
    return not any(
        node.body[0].lineno <= mutant.line <= (node.end_lineno or 0)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def tests_of(mutant: Mutant, lines: dict[tuple[str, int], list[str]]) -> list[str]:
    """Return the tests that run its line; for what runs at import, all tests that run its file."""
    path = str(mutant.path)
    if not runs_at_import(mutant):
        return sorted(lines.get((path, mutant.line), []))
    return sorted({test for (file, _), tests in lines.items() if file == path for test in tests})


def sample_python(copy: Copy, package: str, count: int, choice: random.Random) -> list[Verdict]:
    """Draw and try mutants of one package."""
    everything = [
        m for path in python_files(package) for m in python_mutants.mutants_of(ROOT / path, path)
    ]
    chosen = choice.sample(everything, min(count, len(everything)))
    folders = [f"tests/{name}" for name in FOLDERS[package].split()]
    lines = copy.coverage(package, folders)
    verdicts = []
    for mutant in chosen:
        names = tests_of(mutant, lines)
        choice.shuffle(names)
        verdict = try_python(copy, mutant, names[:TESTS_MAX] or folders)
        verdicts.append(verdict)
        print_verdict(verdict)
    return verdicts


def sample_c(copy: Copy, pattern: str, count: int, choice: random.Random) -> list[Verdict]:
    """Draw and try mutants of C files whose names contain the pattern."""
    everything = [
        m
        for path in c_files()
        if pattern in path.name
        for m in c_mutants.mutants_of(ROOT / path, path)
    ]
    choice.shuffle(everything)
    verdicts: list[Verdict] = []
    for mutant in everything:
        if len(verdicts) == count:
            break
        verdict = try_c(copy, mutant, c_folders(mutant.path))
        if verdict is not None:
            verdicts.append(verdict)
            print_verdict(verdict)
    copy.build()
    return verdicts


def print_verdict(verdict: Verdict) -> None:
    """Print one line as it happens."""
    word = "caught  " if verdict.caught else "SURVIVED"
    print(f"{time.strftime('%H:%M:%S')} {word} {verdict.mutant}   {verdict.how}", flush=True)


def main() -> int:
    """Run the command line: 0 if every mutant was caught."""
    parser = argparse.ArgumentParser(prog="scripts/dev/mutate", description=__doc__)
    parser.add_argument("packages", nargs="+", help="of beluga/, or c, or c:PART OF A FILE'S NAME")
    parser.add_argument("--count", type=int, default=12, help="mutants of each (%(default)s)")
    parser.add_argument("--seed", default="1", help="which (%(default)s)")
    parser.add_argument("--json", action="store_true", help="one object at the end")
    options = parser.parse_args()
    results: dict[str, list[Verdict]] = {}
    with tempfile.TemporaryDirectory(prefix="beluga-mutate-") as folder:
        copy = Copy(Path(folder))
        for package in options.packages:
            choice = random.Random(f"{options.seed} {package}")
            kind, _, pattern = package.partition(":")
            sample = sample_c if kind == "c" else sample_python
            what = pattern if kind == "c" else package
            results[package] = sample(copy, what, options.count, choice)
    for package, verdicts in results.items():
        caught = sum(verdict.caught for verdict in verdicts)
        print(f"{package}: caught {caught} of {len(verdicts)}")
    if options.json:
        print(
            json.dumps(
                {
                    name: [str(v.mutant) for v in found if not v.caught]
                    for name, found in results.items()
                }
            )
        )
    return 0 if all(v.caught for found in results.values() for v in found) else 1


if __name__ == "__main__":
    sys.exit(main())
