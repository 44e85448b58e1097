# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Calls OpenAI's SDK. Run it in .venv-vllm.

Each line of its input is a JSON list of calls, which run at once. A call is a base URL, a method
such as ``chat.completions.create``, and its arguments. The reply is a line of JSON: for each call
null, or the text of an error.
"""

from __future__ import annotations

import json
import operator
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai


def call(requested: tuple[str, str, dict[str, Any]]) -> str | None:
    url, method, arguments = requested
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    try:
        answer = operator.attrgetter(method)(client)(**arguments)
        if arguments.get("stream"):
            for _ in answer:
                pass
    except openai.OpenAIError as error:
        return str(error)
    return None


def main() -> None:
    with ThreadPoolExecutor(8) as threads:
        for line in sys.stdin:
            print(json.dumps(list(threads.map(call, json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
