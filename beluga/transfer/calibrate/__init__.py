# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Measure the costs of copying (``csrc/transfer/``) on this machine, and store them in the user's
cache directory.

The engines in ``engines/`` store their own measurements with it; ``select/`` decides by the costs.
"""
