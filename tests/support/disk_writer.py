# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A process that saves blocks to a disk tier until it is killed: ``PATH SIZE IO FIRST MIXED``.

After each call it prints the numbers of the call's blocks. MIXED (0 or 1) saves blocks of several
lengths, and no more than fit. After some calls it removes two blocks: it prints ``~N`` before the
removal of block N, and ``-N`` when the tier has dropped it.
"""

from __future__ import annotations

import os
import sys
import threading
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.disk_tiers import keys_of, payload_of, records_of

from beluga.tiers.disk import DiskTier

BATCH = 4
LENGTHS = (60_000, 9_000, 261_000)  # their extents are single stripes, so all blocks fit


def length_of(number: int, mixed: bool) -> int:
    return LENGTHS[number // BATCH % 3] if mixed else LENGTHS[0]


def main() -> None:
    path, size, io, first, mixed = sys.argv[1:]
    tier = DiskTier(path, int(size), io=io)
    batches = count(int(first), BATCH)
    limit = int(first) + BATCH * 20 if mixed == "1" else 1 << 60

    def work() -> None:
        while (start := next(batches)) < limit:
            numbers = range(start, start + BATCH)
            length = length_of(start, mixed == "1")
            saved = tier.save(records_of(numbers, length), payload_of(numbers, length))
            done = [n for n, ok in zip(numbers, saved.tolist(), strict=True) if ok]
            os.write(1, (" ".join(map(str, done)) + "\n").encode())
            if start // BATCH % 3 == 0:
                removed = done[:2]
                os.write(1, ("".join(f"~{n} " for n in removed) + "\n").encode())
                if removed and tier.remove_durably(keys_of(removed)).all():
                    os.write(1, ("".join(f"-{n} " for n in removed) + "\n").encode())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(1, b"\n")
    threading.Event().wait()


if __name__ == "__main__":
    main()
