# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The load of workers: what was sent and has not ended, what it costs, and who waits."""
