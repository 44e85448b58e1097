"""Benchmarks: run by ``beluga bench``, described in README.md; installed as ``beluga_bench``."""
