# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What every benchmark stands on: pools, pacing, pinned processes, ratios, rows and pages."""
