"""``python -m rocketmq_spark.localbroker FOLDER`` writes the configuration files that docker-compose.yml mounts."""

from __future__ import annotations

import sys
from pathlib import Path

from rocketmq_spark.localbroker.config import write_compose_files

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m rocketmq_spark.localbroker FOLDER")
    write_compose_files(Path(sys.argv[1]))
