# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The routing policies, one file for each, and the helpers that they share.

``registry`` makes a policy by the name that the command line gives it.
"""
