# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command line, one module per noun. No other package imports it."""
