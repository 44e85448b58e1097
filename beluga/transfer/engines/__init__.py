# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The copy engines, one folder for each; all implement ``beluga/transfer/engine.py``.

``policy`` is the table of the cache maintenance that each of them needs.
"""
