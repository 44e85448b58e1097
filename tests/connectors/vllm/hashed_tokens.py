# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Prints the tokens that ``beluga gateway`` hashes of requests, as JSON. Run it in .venv-vllm,
which has the tokenizer's packages.

Its input is ``{"tokenizer": FOLDER, "requests": [[PATH, BODY], ...]}`` in JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from beluga.gateway.conversation import load_tokenizer
from beluga.gateway.parsed_request import parse_request


def main() -> None:
    given = json.load(sys.stdin)
    tokenizer = load_tokenizer(Path(given["tokenizer"]), trusted=True)
    hashes = [
        parse_request(path, json.dumps(body).encode(), tokenizer=tokenizer).tokens.tolist()
        for path, body in given["requests"]
    ]
    print(json.dumps(hashes))


if __name__ == "__main__":
    main()
