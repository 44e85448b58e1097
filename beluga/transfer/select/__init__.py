# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Selection: which copy engines this machine has, and which of them copies what.

``selection`` registers the selected engine of one cache with the link scheduler of its host.
"""
