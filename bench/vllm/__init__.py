# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Measurements of a real vLLM on the pool, which ``scripts/vllm-demo`` and ``vllm-bench`` run.

Each engine is a separate process (``engine.py``), and ``process.py`` sends it commands. Only these
processes import vllm; everything else here runs without it.
"""

from __future__ import annotations
