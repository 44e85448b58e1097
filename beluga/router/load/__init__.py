# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The load of workers: the requests that were sent and have not ended, their cost, and the
queue.
"""
