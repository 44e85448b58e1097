# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The link scheduler, which chooses the next copy of this host on the link to a pool
(``csrc/iosched/``).

All processes of a host share a link. This package does not copy bytes.
"""
