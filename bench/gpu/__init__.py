# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The rows of a GPU, and a null GPU that shows what a link and a cache leave of its speed."""
