"""The command ``rocketmq-spark``. Each group of commands has a file; all commands print through ``output.Output``.

``command`` imports the file of a group only when one of its commands runs, so that ``--help`` is quick.
"""

from __future__ import annotations

import io
import sys

from rocketmq_spark.base import extras

__all__ = ["main"]


def main() -> None:
    """Entry point of the console script."""
    missing = [name for name in ("click", "rich") if not extras.is_installed(name)]
    if missing:
        sys.exit(f"Error: the command needs {' and '.join(missing)}: {extras.install_command(extras.CLI)}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does, because a body may have any character
    from rocketmq_spark.cli.command import app

    app(prog_name="rocketmq-spark")
