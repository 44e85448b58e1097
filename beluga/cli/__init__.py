# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command line, with one module for each noun. No other package imports it."""
