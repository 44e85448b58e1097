# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Other people's pools under the same engines: what it takes to run each beside ours."""
