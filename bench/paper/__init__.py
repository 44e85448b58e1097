# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The experiments of the paper: primitives, latency, bandwidth, copies and calls."""
