# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Builds the C core with cffi and names the packages; the rest is in pyproject.toml."""

import os
import re
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent / "scripts/dev"))

# scripts/dev/setup-env builds those that it needs itself, at the same time as others.
EXTENSIONS = {"core": "beluga/_build.py:core", "limit": "bench/_build_limit.py:limit"}
NAMED = os.environ.get("BELUGA_EXTENSIONS", "core,limit")

FIRST_ABI = "cp310"  # the C core uses the stable ABI: one wheel serves this CPython and later ones


def readme() -> str:
    """README.md for package indexes, where a link to a file of the repository leads nowhere."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    return re.sub(r"!?\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


class BuildExt(build_ext):
    """Also writes the types of each extension, for type checkers. An installation has no debug
    sections, which take two thirds of a file.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        if not self.inplace:
            for each in self.extensions:
                each.extra_link_args = [*each.extra_link_args, "-Wl,--strip-debug"]

    def build_extension(self, ext: Extension) -> None:
        print(f"compiling {ext.name}", file=sys.stderr, flush=True)
        super().build_extension(ext)

    def run(self) -> None:
        super().run()
        from gen_stubs import stub_of

        for each in self.extensions:
            file = Path(self.get_ext_fullpath(each.name))
            file.with_name(f"{file.name.partition('.')[0]}.pyi").write_text(stub_of(each.name))


free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))  # has no stable ABI

setup(
    cmdclass={"build_ext": BuildExt},
    options={} if free_threaded else {"bdist_wheel": {"py_limited_api": FIRST_ABI}},
    long_description=readme(),
    long_description_content_type="text/markdown",
    packages=[
        *find_packages(include=["beluga", "beluga.*"]),
        "beluga.transfer.cuda.kernels",
        "beluga.transfer.cuda.kernels.cuda",
        "beluga.transfer.cuda.kernels.cuda.nvrtc",
        "beluga_bench",
        *(f"beluga_bench.{room}" for room in find_packages("bench")),
    ],
    package_dir={"beluga_bench": "bench", "beluga.transfer.cuda.kernels": "csrc"},
    cffi_modules=[EXTENSIONS[name] for name in NAMED.split(",") if name],
)
