# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Parses command lines as ``vllm serve`` would; each is a JSON list of words. Run it in .venv-vllm.

It prints the KV connector of each as JSON. A command line that vLLM refuses ends it with an error.
"""

from __future__ import annotations

import json
import sys

from vllm.entrypoints.cli.serve import cmd_init
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    connectors = []
    for words in json.load(sys.stdin):
        parser = FlexibleArgumentParser(prog="vllm")
        (command,) = cmd_init()
        command.subparser_init(parser.add_subparsers(dest="subparser"))
        config = parser.parse_args(words).kv_transfer_config
        connectors.append(getattr(config, "kv_connector", None) or config["kv_connector"])
    print(json.dumps(connectors))


if __name__ == "__main__":
    main()
