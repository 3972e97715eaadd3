"""Writes the tables of docs/options.md, errors.md and metrics.md from those of the code (their heads are kept), the types of
keywords, the first pages of the site, and the configuration files that docker-compose.yml mounts."""

from __future__ import annotations

from pathlib import Path

import front_page
from options_page import errors_markdown, markdown, typed_keywords

from rocketmq_spark.localbroker.servers import write_compose_files
from rocketmq_spark.spark.monitoring import metrics_listener

HERE = Path(__file__).parent

if __name__ == "__main__":
    for name, heading, text in (
        ("options.md", "## Connection", markdown()),
        ("errors.md", "## Codes", errors_markdown()),
        ("metrics.md", "## Figures", metrics_listener.metrics_table()),
    ):
        page = HERE / name
        page.write_text(page.read_text("utf-8").partition(heading)[0] + text, "utf-8")
    types = HERE.parent / "rocketmq_spark" / "options" / "typed.py"
    types.write_text(typed_keywords(), "utf-8")
    write_compose_files(HERE.parent / "conf")
    front_page.write()
