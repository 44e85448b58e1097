# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Other libraries that do the same work, with which Beluga is compared."""
