# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The load of workers: their unfinished requests, the cost of these, and the queue.

The sums and costs per block and worker are computed in C (``csrc/routing/``).
"""
