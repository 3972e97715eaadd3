"""Types of numbers on the command line. Only plain digits are accepted, as in options; click also accepts 1_000."""

from __future__ import annotations

import math
from typing import Any

import click

from rocketmq_spark.options import parsing


class IntRange(click.IntRange):
    """A whole number within bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(_require_plain_digits(value, param, ctx), param, ctx)


class FloatRange(click.FloatRange):
    """A finite number within bounds. Click's bounds let ``nan`` pass, and also ``inf`` if there is no bound on that side."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(_require_plain_digits(value, param, ctx), param, ctx)
        if not math.isfinite(number):
            raise click.BadParameter(f"{value!r} is not a finite number.", ctx, param)
        return number


class SizeType(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """A number of bytes, as in options: ``256k``, ``4m``, ``1g`` or plain bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parsing.size()(value)
        except ValueError as e:
            raise click.BadParameter(f"{value!r} is not {e}.", param=param, ctx=ctx) from None


def _require_plain_digits(value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
    if isinstance(value, str) and ("_" in value or not value.isascii()):
        raise click.BadParameter(f"{value!r} is not a number of plain digits.", ctx, param)
    return value
