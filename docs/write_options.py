"""Writes the tables of docs/options.md from those of options and columns; what stands above them is kept."""

from __future__ import annotations

from pathlib import Path

from rocketmq_spark.options_page import markdown

PAGE = Path(__file__).with_name("options.md")

if __name__ == "__main__":
    head = PAGE.read_text("utf-8").partition("## Connection")[0]
    PAGE.write_text(head + markdown(), "utf-8")
