"""Folders of queries as released versions wrote them (``checkpoints/<commit>/<query>``), made to fit a broker of today.

Each version ran two queries on a LocalBroker with topic ``orders``, two queues of three messages each, tagged ``a``:

* ``filtered``: ``tags=a``; batch 0 read all; then ``prices`` was subscribed to, too, one queue with two messages, and
  ``orders/0`` got two more, which batch 1 read; batch 2 was begun, for two more of ``orders/1``, and failed.
* ``environment``: ``environment=2`` (queue ``orders/1``); batch 0 read three messages, batch 1 two.
"""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

STORED = Path(__file__).parent / "checkpoints"
VERSIONS = sorted(path.name for path in STORED.iterdir())
QUERIES = ("environment", "filtered")


def adopted(version: str, query: str, target: Path, **topics: str) -> Path:
    """A copy of a folder whose ``topics`` have other names, and whose messages were stored until now."""
    folder = target / f"{version}-{query}"
    shutil.copytree(STORED / version / query, folder)
    now = str(time.time_ns() // 1_000_000)
    for path in (folder / "offsets").iterdir():
        text = re.sub(r"\b1795\d{9}\b", now, path.read_text())
        for name, other in topics.items():
            text = text.replace(f'"{name}"', f'"{other}"')
        path.write_text(text)
    return folder
