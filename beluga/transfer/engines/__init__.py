# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The copy engines, one folder for each; all of them are what ``beluga/transfer/engine.py`` says.

``policy`` is the table of the cache maintenance that each of them needs.
"""
