# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``python -m beluga``: the ``beluga`` command."""

from beluga.cli import main

if __name__ == "__main__":
    main.main()
