# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command line. One module per noun; nothing below imports it."""
