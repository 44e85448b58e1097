# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The distribution is right: the sources are complete, the name is ours, the version is stated
once; and in a checkout without a built core the installed one runs.
"""

import importlib.metadata
import os
import re
import shutil
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest
from support.commands import captured
from support.emulation import long
from support.shown import blocks

import beluga
from beluga.connectors.releases import RELEASES
from beluga.pool import scratch_folder

# ---- The distribution is right: the sources are complete, the name is ours, and the version is
# stated once.


ROOT = Path(__file__).resolve().parents[2]
PARTS = ("beluga", "bench", "csrc", "docs", "scripts", "tests")
GENERATED = ("beluga/_core.c", "beluga/_core.pyi", "bench/_limit.c", "bench/_limit.pyi")
PASSING = shutil.ignore_patterns("__pycache__", "*.so", "*.o", ".*_cache", "*.egg-info")

BUILD = "import setuptools.build_meta as b; print(b.build_sdist('made'))"


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution from a copy without old lists of sources."""
    pytest.importorskip("setuptools")
    copy = tmp_path_factory.mktemp("sources") / "copy"
    for name in PARTS:
        shutil.copytree(ROOT / name, copy / name, ignore=PASSING)
    for path in ROOT.iterdir():
        if path.is_file() and path.suffix in (".py", ".toml", ".in", ".md", ".yml", ""):
            shutil.copy(path, copy / path.name)
    for name in GENERATED:
        (copy / name).unlink(missing_ok=True)
    command = [sys.executable, "-c", BUILD]
    made = captured(command, cwd=copy)
    assert made.returncode == 0, made.stderr
    return copy / "made" / made.stdout.split()[-1]


@pytest.fixture(scope="module")
def sdist(archive: Path) -> set[str]:
    """The names in it."""
    with tarfile.open(archive) as opened:
        return {name.partition("/")[2] for name in opened.getnames()}


@pytest.mark.long
def test_the_source_distribution_has_all_sources(sdist: set[str]) -> None:
    wanted = {
        str(path.relative_to(ROOT))
        for name in PARTS
        for path in (ROOT / name).rglob("*")
        if path.is_file()
        if path.suffix in (".c", ".h", ".cu", ".cuh", ".py", ".pyi", ".typed")
        or (path.is_relative_to(ROOT / "scripts") and "__pycache__" not in path.parts)
        or name == "docs"
        or path.name in ("README.md", "FORMAT.md")  # the site has them as pages
    } - set(GENERATED)
    wanted |= {"pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"}
    wanted |= {"mkdocs.yml"}
    assert wanted - sdist == set()
    assert [name for name in sdist if name.endswith((".so", ".pyc")) or name in GENERATED] == []


@pytest.mark.long
def test_an_installation_has_what_the_packages_need(tmp_path: Path) -> None:
    """Every file of the packages, and the sources of the CUDA kernels, but no other C."""
    pytest.importorskip("setuptools")
    build = [sys.executable, "setup.py", "-q", "egg_info", "-e", tmp_path]
    build += ["build_py", "-d", tmp_path / "installed"]
    made = captured(build, cwd=ROOT)
    assert made.returncode == 0, made.stderr
    installed = {
        str(path.relative_to(tmp_path / "installed"))
        for path in (tmp_path / "installed").rglob("*")
        if path.is_file()
    }
    wanted = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "beluga").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
        if path.suffix not in (".so", ".c") and path.name != "_core.pyi"
    }
    assert wanted - installed == set()
    kernels = "beluga/transfer/cuda/kernels/"
    cuda = {path.name for path in (ROOT / "csrc/cuda").glob("*.cu*")}
    assert cuda <= {Path(name).name for name in installed if name.startswith(kernels)}
    assert [name for name in installed if name.endswith(".c") or name.startswith("tests")] == []


def container_file(name: str) -> str:
    return (ROOT / "docs/deploy/container" / f"Containerfile.{name}").read_text()


def test_the_container_file_names_a_vllm_that_the_connector_supports() -> None:
    version = re.search(r"^ARG BASE=vllm/vllm-openai:v(\S+)$", container_file("vllm"), re.MULTILINE)
    assert version is not None
    assert RELEASES["vllm"].has(version[1])


def test_containers_run_the_command_as_a_user_without_privileges() -> None:
    last = container_file("server").rpartition("\nFROM ")[2]
    user = re.search(r"^USER (\d+)$", last, re.MULTILINE)
    assert user is not None
    assert int(user[1]) > 0
    assert 'ENTRYPOINT ["beluga"]' in last


@pytest.mark.long
def test_the_package_index_page_has_no_links_into_the_repository(archive: Path) -> None:
    with tarfile.open(archive) as opened:
        member = opened.extractfile(archive.name.removesuffix(".tar.gz") + "/PKG-INFO")
        assert member is not None
        description = member.read().decode()
    assert "Ten lines of Python" in description
    assert re.findall(r"\]\((?!https?:)[^)]*\)", description) == []


def test_the_version_is_that_of_the_distribution() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", beluga.__version__)
    assert importlib.metadata.version("beluga-kv") == beluga.__version__


@pytest.mark.parametrize("name", ["beluga", "cxl-rpc"])
def test_the_commands_print_the_version(name: str) -> None:
    program = Path(sys.executable).with_name(name)
    if not program.exists():
        pytest.skip(f"{name} is not installed beside {sys.executable}")
    output = captured([program, "--version"])
    assert (output.returncode, output.stdout) == (0, f"beluga-kv {beluga.__version__}\n")


def test_no_text_names_another_project_to_install() -> None:
    """The package called beluga on PyPI is another project's."""
    texts = [path for path in ROOT.glob("*.*") if path.is_file()]
    texts += [
        path
        for name in PARTS
        for path in (ROOT / name).rglob("*")
        if path.suffix in (".py", ".md", ".c", ".h", ".cuh", "") and path.is_file()
    ]
    other = re.compile(
        r"((?<!un)install|uv add|pipx)[^\n]{0,30}?[ '\"]beluga(?![-\w/])|beluga\[\w+\]"
    )
    wrong = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in texts
        if path != Path(__file__)
        for match in other.finditer(path.read_text(errors="replace"))
    ]
    assert wrong == []


def test_packages_of_the_commands_are_dependencies() -> None:
    """``import beluga`` needs only numpy and cffi: see test_the_library_needs_no_tools. tomli is
    only for Python 3.10.
    """
    required = importlib.metadata.requires("beluga-kv") or []
    always = {re.split(r"[<>=!~ ;\[]", one)[0] for one in required if "extra ==" not in one}
    assert always == {"numpy", "cffi", "click", "rich", "msgspec", "aiohttp", "tomli"}
    assert [one for one in required if re.search("<|==|~=", one.partition(";")[0])] == []


# ---- In a checkout's own folder, whose C core is not built, the installed Beluga runs.


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
    done = captured(
        [sys.executable, "-S", *arguments],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(places)},
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
