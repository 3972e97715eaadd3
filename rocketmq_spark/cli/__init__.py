"""The command ``rocketmq-spark``: one file per group of commands, one interface for what they print.

Nothing heavy is imported before a command runs, so that ``--help`` is quick; see ``command``.
"""

from __future__ import annotations

import io
import sys

from rocketmq_spark.base import extras

__all__ = ["main"]


def main() -> None:
    """Entry point of the console script."""
    missing = [name for name in ("click", "rich") if not extras.installed(name)]
    if missing:
        sys.exit(f"Error: the command needs {' and '.join(missing)}: {extras.install_command(extras.CLI)}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error has it: bodies may have any character
    from rocketmq_spark.cli.command import app

    app(prog_name="rocketmq-spark")
