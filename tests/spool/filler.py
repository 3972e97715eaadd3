"""A process that fills a store and closes it, or ends without a word."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rocketmq_spark.spool.store import Store
from tests.spool.bench import record


def main() -> None:
    store = Store(Path(sys.argv[1]), sync="never")
    for i in range(int(sys.argv[2])):
        store.add([(record(b"%d" % i + b"x" * 200, lane=b"l" if i % 3 == 0 else b""), i)])
    if sys.argv[3] == "die":
        os._exit(0)
    store.close()


if __name__ == "__main__":
    main()
