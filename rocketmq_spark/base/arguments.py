"""Checks of the arguments of public calls. Each error names the argument, its value and what was expected."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable
from numbers import Integral, Real
from types import FunctionType
from typing import Any

from rocketmq_spark.base.threads import safe_text
from rocketmq_spark.errors import OptionError

_MAX_SHOWN_CHARACTERS = 100


def short_repr(value: object) -> str:
    """Return the text of a value for an error. A long text, such as the text of a message with a body, is cut."""
    text = safe_text(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}…"


def argument_error(name: str, value: object, expected: str) -> OptionError:
    return OptionError(f"{name} is {short_repr(value)}; expected {expected}")


def check_instance(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Raise ``OptionError`` unless ``value`` is an instance of ``kind``."""
    if not isinstance(value, kind):
        raise argument_error(name, value, expected)


def check_text(name: str, value: object, expected: str = "a str") -> None:
    check_instance(name, value, str, expected)


def check_texts(name: str, value: object, expected: str) -> None:
    """Raise ``OptionError`` unless ``value`` is a collection of str. A single str is rejected, although a str is itself a
    collection of str.
    """
    if not isinstance(value, Collection) or isinstance(value, str) or not all(isinstance(each, str) for each in value):
        raise argument_error(name, value, expected)


def is_integer(value: object) -> bool:
    """Whether a value is an integer, of Python or of numpy. A bool is not accepted as an integer, although Python derives bool
    from int.
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_seconds(name: str, value: object, max_s: float = math.inf) -> float:
    """Return a timeout as a float. Raises ``OptionError`` if the timeout is not a number, or more than ``max_s``."""
    if isinstance(value, bool) or not isinstance(value, Real) or not value <= max_s:
        raise argument_error(name, value, "a number of seconds" + (f" up to {max_s:.0f}" if max_s < math.inf else ""))
    return float(value)


def check_function(name: str, value: Any, parameters: str, *, allows_coroutines: bool = False) -> None:
    """Raise ``OptionError`` unless ``value`` can be called with the arguments in ``parameters``, such as ``messages, context``.

    Without ``allows_coroutines``, a coroutine function is rejected, because no caller would await its coroutines.
    """
    expected = f"a function that takes ({parameters})"
    if not callable(value):
        raise argument_error(name, value, expected)
    if (kind := _deferred_kind(value)) and not (allows_coroutines and kind == "coroutine function"):
        hint = "; rocketmq_spark.aio awaits coroutines" if kind == "coroutine function" else ""
        raise OptionError(
            f"{name} is the {kind} {short_repr(value)}, whose body would never run; expected {expected}{hint}"
        )
    try:
        # A call of a decorated function goes to the decorator's wrapper, so the wrapper must accept the arguments.
        signature = inspect.signature(value, follow_wrapped=False)
    except (TypeError, ValueError):  # a built-in function may have no signature
        return
    try:
        signature.bind(*parameters.split(", "))
    except TypeError as e:
        raise OptionError(f"{name} takes {signature}: {e}; expected {expected}") from None


def _deferred_kind(code: Any) -> str | None:
    """Return the kind of a function whose call does not run its body, but returns a coroutine or generator; otherwise None."""
    if isinstance(code, FunctionType) and not code.__code__.co_flags & _DEFERRED_FLAGS:
        # The usual case, which must be fast.
        return None
    while isinstance(code, functools.partial):
        code = code.func
    if not inspect.isroutine(code):
        code = type(code).__call__  # an object with ``__call__``
    for kind, is_kind in _DEFERRED_KINDS.items():
        if is_kind(code):
            return kind
    return None


_DEFERRED_FLAGS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_DEFERRED_KINDS: dict[str, Callable[[Any], bool]] = {
    "coroutine function": inspect.iscoroutinefunction,
    "asynchronous generator function": inspect.isasyncgenfunction,
    "generator function": inspect.isgeneratorfunction,
}


def check_synchronous(name: str, value: Any) -> None:
    """Raise ``OptionError`` if a callable is a coroutine function or generator function: a call would not run its body."""
    if kind := _deferred_kind(value):
        raise OptionError(f"{name} is the {kind} {short_repr(value)}; expected a function that returns its result")


# The limit for compared pairs of characters. 10,000 comparisons of names with 20 characters, or 250 comparisons of names with
# 127 characters, reach this limit.
_MAX_PAIRS = 4_000_000
_MAX_COMPARED_CHARACTERS = 127  # longer names are not compared


def similar_names(name: str, names: Iterable[str], count: int, cutoff: float) -> list[str]:
    """Return up to ``count`` names that are similar to ``name``, the most similar one first.

    A server may report any number of names, and the time to compare two names grows with the product of their lengths. So the
    comparison ends after ``_MAX_PAIRS`` pairs of characters, which take about half a second. Names that begin with the same
    letter as ``name`` are compared first. Names of more than ``_MAX_COMPARED_CHARACTERS`` are left out.
    """
    name, pairs_left = name[:_MAX_COMPARED_CHARACTERS], _MAX_PAIRS
    compared_names: list[str] = []
    for candidate in sorted(
        (candidate for candidate in names if len(candidate) <= _MAX_COMPARED_CHARACTERS),
        key=lambda candidate: candidate[:1] != name[:1],
    ):
        pairs_left -= (len(name) + 1) * (len(candidate) + 1)
        if pairs_left < 0:
            break
        compared_names.append(candidate)
    return difflib.get_close_matches(name, compared_names, n=count, cutoff=cutoff)
