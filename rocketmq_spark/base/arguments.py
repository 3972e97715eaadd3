"""Checks of the arguments of public calls. Each error names the argument, its value and what was expected."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection
from numbers import Integral, Real
from types import FunctionType
from typing import Any

from rocketmq_spark.base.threads import text_of
from rocketmq_spark.errors import OptionError

_MOST_SHOWN = 100


def shown(value: object) -> str:
    """The value as an error shows it: a long one, such as a message with its body, is cut."""
    text = text_of(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def wrong(name: str, value: object, expected: str) -> OptionError:
    return OptionError(f"{name} is {shown(value)}; expected {expected}")


def instance(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Raise ``OptionError`` unless ``value`` is of the ``kind``."""
    if not isinstance(value, kind):
        raise wrong(name, value, expected)


def text(name: str, value: object, expected: str = "a str") -> None:
    instance(name, value, str, expected)


def texts(name: str, value: object, expected: str) -> None:
    """Raise ``OptionError`` unless ``value`` is a collection of texts. One text is none, although it has characters."""
    if not isinstance(value, Collection) or isinstance(value, str) or not all(isinstance(each, str) for each in value):
        raise wrong(name, value, expected)


def is_whole(value: object) -> bool:
    """Whether a value is a whole number, also one of numpy's. A bool is none, although Python derives it from int."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def seconds(name: str, value: object, most_s: float = math.inf) -> float:
    """Return a timeout. Raises ``OptionError`` if it is not a number, or more than ``most_s``."""
    if isinstance(value, bool) or not isinstance(value, Real) or not value <= most_s:
        raise wrong(name, value, "a number of seconds" + (f" up to {most_s:.0f}" if most_s < math.inf else ""))
    return float(value)


def function(name: str, value: Any, takes: str, *, coroutines: bool = False) -> None:
    """Raise ``OptionError`` unless ``value`` can be called with the arguments that ``takes`` lists: ``messages, context``.

    Without ``coroutines`` a coroutine function is wrong: nothing would await its coroutines.
    """
    expected = f"a function that takes ({takes})"
    if not callable(value):
        raise wrong(name, value, expected)
    if (kind := _kind(value)) and not (coroutines and kind == "coroutine function"):
        aside = "; rocketmq_spark.aio awaits coroutines" if kind == "coroutine function" else ""
        raise OptionError(
            f"{name} is the {kind} {shown(value)}, whose body would never run; expected {expected}{aside}"
        )
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # a built-in function may have none
        return
    try:
        signature.bind(*takes.split(", "))
    except TypeError as e:
        raise OptionError(f"{name} takes {signature}: {e}; expected {expected}") from None


def _kind(code: Any) -> str | None:
    """The kind of a function that only creates an object when it is called; None for others."""
    if isinstance(code, FunctionType) and not code.__code__.co_flags & _CREATES:  # by far the most, at every send
        return None
    while isinstance(code, functools.partial):
        code = code.func
    if not inspect.isroutine(code):
        code = type(code).__call__  # an object with ``__call__``
    for kind, test in _KINDS.items():
        if test(code):
            return kind
    return None


_CREATES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_KINDS: dict[str, Callable[[Any], bool]] = {
    "coroutine function": inspect.iscoroutinefunction,
    "asynchronous generator function": inspect.isasyncgenfunction,
    "generator function": inspect.isgeneratorfunction,
}


def synchronous(name: str, value: Any) -> None:
    """Raise ``OptionError`` unless a callable runs its body when it is called."""
    if kind := _kind(value):
        raise OptionError(f"{name} is the {kind} {shown(value)}; expected a function that returns its result")
