"""Functions that a user names as ``module:callable``, and the sentence for a name that means nothing."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from rocketmq_spark.errors import OptionError

# Where options come from strangers, as in a service that runs the queries of others, names of code must not be followed.
ALLOWED = "ROCKETMQ_SPARK_ALLOW_CALLABLES"
_NO = ("0", "false", "no")


def resolve(given: str | Callable[..., Any], option: str) -> Callable[..., Any]:
    """``given`` itself when it can be called, else what ``module:callable`` names; ``option`` is for the error."""
    if callable(given):
        return given
    if os.environ.get(ALLOWED, "1").strip().lower() in _NO:
        raise OptionError(
            f"option {option!r} is {given!r}, which names code, and variable {ALLOWED} says that options name none",
            remedy="Give a built-in value, or the function itself; or have the variable changed by who set it",
        )
    module, _, path = given.partition(":")
    try:
        thing: Any = importlib.import_module(module)
        for part in path.split("."):
            thing = getattr(thing, part)
    except (ImportError, AttributeError, ValueError) as e:
        raise OptionError(f"option {option!r} is {given!r}; expected module:callable that can be imported ({e})") from e
    if not callable(thing):
        raise OptionError(f"option {option!r} is {given!r}; expected a callable, found {type(thing).__name__}")
    called: Callable[..., Any] = thing
    return called


def nearest(option: str, given: str, known: Sequence[str]) -> str:
    """What is wrong with ``given``, the known names, and the one that was probably meant."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(given.lower(), by_lower, n=1)
    hint = f"; did you mean {by_lower[near[0]]!r}?" if near else ""
    return f"option {option!r} is {given!r}; expected one of {', '.join(known)}{hint}"
