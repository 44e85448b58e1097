# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Common parts of the benchmarks: pools, pacing, pinned processes, ratios, rows and pages."""

from beluga.errors import CoreMissingError

try:
    from .. import _limit  # noqa: F401
except ImportError as error:
    raise CoreMissingError(
        "the benchmarks' loops are not built (bench/_limit); run scripts/dev/setup-env"
    ) from error
