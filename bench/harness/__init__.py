# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Common parts of the benchmarks: pools, pacing, pinned processes, ratios, rows and pages."""
