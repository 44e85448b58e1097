# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The rows of a GPU, and a null GPU, which measures the overhead of link and cache."""
