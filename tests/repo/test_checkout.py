# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""In a checkout's own folder, whose C core is not built, the installed Beluga runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support.emulation import long
from support.shown import blocks

from beluga.pool import scratch_folder

ROOT = Path(__file__).resolve().parents[2]
BUILT = shutil.ignore_patterns("__pycache__", "*.so", "_core.c")
PACKAGES = sysconfig.get_path("purelib"), sysconfig.get_path("platlib")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "beluga", tmp_path / "clone/beluga", ignore=BUILT)
    return tmp_path / "clone"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder of packages with the files of ``pip install .``."""
    passing = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "beluga", tmp_path / "site/beluga", ignore=passing)
    return tmp_path / "site"


def python(checkout: Path, *arguments: str, path: tuple[Path, ...] = ()) -> tuple[int, str, str]:
    """Run in the checkout, without the editable installation of the tests."""
    places = [*map(str, path), *dict.fromkeys(PACKAGES)]
    done = subprocess.run(
        [sys.executable, "-S", *arguments],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def test_the_installed_package_is_imported(checkout: Path, installed: Path) -> None:
    code = "import beluga, beluga.pool as pool; print(beluga.__file__, pool.__file__, sep='\\n')"
    status, output, _ = python(checkout, "-c", code, path=(installed,))
    names = ("beluga/__init__.py", "beluga/pool/__init__.py")
    files = [installed / name for name in names]
    assert (status, output.splitlines()) == (0, list(map(str, files)))


def test_the_readme_runs_in_the_checkout(checkout: Path, installed: Path) -> None:
    (block,) = [one for one in blocks(ROOT / "README.md") if one.language == "python"]
    with scratch_folder("checkout", Path("/dev/shm")) as folder:
        program = checkout / "program.py"
        program.write_text(block.text.replace("/dev/shm", str(folder)))
        assert python(checkout, "program.py", path=(installed,)) == (0, "8", "")
        assert python(checkout, "-c", program.read_text(), path=(installed,)) == (0, "8", "")


@pytest.mark.parametrize(
    "program", [["-m", "beluga"], long(["-c", "import beluga.cli.main as m; m.main()"])]
)
def test_the_command_runs_in_the_checkout(
    checkout: Path, installed: Path, program: list[str]
) -> None:
    status, output, _ = python(checkout, *program, "doctor", "--json", path=(installed,))
    assert status in (0, 1)  # the findings depend on the machine
    assert '"cpu-flush"' in output


def test_a_checkout_with_a_core_is_imported_itself(checkout: Path, installed: Path) -> None:
    (core,) = (ROOT / "beluga").glob("_core*.so")
    shutil.copy(core, checkout / "beluga")
    code = "import beluga; print(beluga.__file__)"
    status, output, _ = python(checkout, "-c", code, path=(installed,))
    assert (status, output) == (0, str(checkout / "beluga/__init__.py"))


def test_without_an_installation_the_error_is_one_line_with_a_remedy(checkout: Path) -> None:
    advice = f"{checkout} has no C core; run 'pip install .' or scripts/dev/setup-env there"
    status, _, output = python(checkout, "-c", "from beluga import Pool")
    assert (status, output.splitlines()[-1]) == (1, f"beluga.errors.CoreMissingError: {advice}")
    assert python(checkout, "-m", "beluga", "ping") == (1, "", f"beluga: error: {advice}")


def test_a_core_that_cannot_be_loaded_is_reported(checkout: Path) -> None:
    (core,) = (ROOT / "beluga").glob("_core*.so")
    (checkout / "beluga" / core.name).write_bytes(b"of another machine")
    status, output, error = python(checkout, "-m", "beluga", "ping")
    assert (status, output) == (1, "")
    assert error.startswith("beluga: error: the C core cannot be loaded: ")
    assert error.endswith("; build it again")
    assert len(error.splitlines()) == 1
