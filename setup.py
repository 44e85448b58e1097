# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Builds the C core with cffi and names the packages; the rest is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["beluga", "beluga.*"]),
        "beluga.transfer.cuda.kernels",
        "beluga.transfer.cuda.kernels.cuda",
        "beluga.transfer.cuda.kernels.cuda.nvrtc",
        "beluga_bench",
        "beluga_bench.vllm",
        "beluga_bench.vllm.peers",
    ],
    package_dir={"beluga_bench": "bench", "beluga.transfer.cuda.kernels": "csrc"},
    cffi_modules=["beluga/_build.py:core", "beluga/_build.py:sim", "bench/_build_limit.py:limit"],
)
