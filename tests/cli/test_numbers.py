"""Numbers of commands are of plain digits, as in options."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from rocketmq_spark.cli.command import app
from rocketmq_spark.cli.numbers import FloatRange, IntRange

NUMBERS = (click.types.IntParamType, click.types.FloatParamType)


def commands(group: click.Group) -> Iterator[click.Command]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield command
        if isinstance(command, click.Group):
            yield from commands(command)


def test_all_numbers_of_commands_are_of_plain_digits() -> None:
    types = [parameter.type for command in commands(app) for parameter in command.params]
    numbers = [each for each in types if isinstance(each, NUMBERS)]
    assert len(numbers) > 10
    assert all(isinstance(each, (IntRange, FloatRange)) for each in numbers)


@pytest.mark.parametrize("value", ["1_000", "\u0661"])
@pytest.mark.parametrize(
    "arguments", [("tail", "t", "--count"), ("topic", "create", "t", "--queues"), ("lag", "--watch", "--interval")]
)
def test_underscores_and_other_digits_are_errors(arguments: tuple[str, ...], value: str) -> None:
    done = CliRunner().invoke(app, [*arguments, value])
    assert (done.exit_code, "is not a number of plain digits" in done.output) == (2, True)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "Infinity", "1e999"])
@pytest.mark.parametrize(
    "arguments", [("demo", "--seconds"), ("demo", "--rate"), ("lag", "--watch", "--interval"), ("tail", "t", "--idle")]
)
def test_numbers_that_are_not_finite_are_errors(arguments: tuple[str, ...], value: str) -> None:
    done = CliRunner().invoke(app, [*arguments, value])
    assert (done.exit_code, arguments[-1] in done.output) == (2, True)
