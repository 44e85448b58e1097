# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Selection: the copy engines of this machine, and the choice among them for a copy.

``selection`` registers the selected engine of one cache with the link scheduler of its host.
"""
