"""Builds the C core with cffi; everything else is in pyproject.toml."""

from setuptools import setup

setup(cffi_modules=["beluga/_build.py:core", "beluga/_build.py:sim"])
