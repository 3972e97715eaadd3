"""The command ``rocketmq-spark``: one file per group of commands, one interface for what they print.

Nothing heavy is imported before a command runs, so that ``--help`` is quick; see ``app``.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the console script."""
    from rocketmq_spark.cli.app import app

    app(prog_name="rocketmq-spark")
