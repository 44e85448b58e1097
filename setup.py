# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Builds the C core with cffi and names the packages; the rest is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup


def readme() -> str:
    """README.md for package indexes, where a link to a file of the repository leads nowhere."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    return re.sub(r"!?\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    packages=[
        *find_packages(include=["beluga", "beluga.*"]),
        "beluga.transfer.engines.cuda.kernels",
        "beluga.transfer.engines.cuda.kernels.cuda",
        "beluga.transfer.engines.cuda.kernels.cuda.nvrtc",
        "beluga_bench",
        "beluga_bench.vllm",
        "beluga_bench.vllm.peers",
    ],
    package_dir={"beluga_bench": "bench", "beluga.transfer.engines.cuda.kernels": "csrc"},
    cffi_modules=["beluga/_build.py:core", "beluga/_build.py:sim", "bench/_build_limit.py:limit"],
)
