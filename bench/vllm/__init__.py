# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A real vLLM on the pool, measured: what ``scripts/vllm-demo`` runs.

Engines are processes of their own (``engine.py``), spoken to through ``process.py``. Only those
import vllm; all else here runs without it.
"""

from __future__ import annotations
