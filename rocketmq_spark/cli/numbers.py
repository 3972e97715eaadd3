"""Types of numbers on the command line. As in options, only plain digits count: click itself accepts 1_000 and other scripts."""

from __future__ import annotations

import math
from typing import Any

import click


class IntRange(click.IntRange):
    """A whole number within bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(_plain(value, param, ctx), param, ctx)


class FloatRange(click.FloatRange):
    """A finite number within bounds. No bound excludes ``nan``, and a lower one alone includes ``inf``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(_plain(value, param, ctx), param, ctx)
        if not math.isfinite(number):
            raise click.BadParameter(f"{value!r} is not a finite number.", ctx, param)
        return number


def _plain(value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
    if isinstance(value, str) and ("_" in value or not value.isascii()):
        raise click.BadParameter(f"{value!r} is not a number of plain digits.", ctx, param)
    return value
