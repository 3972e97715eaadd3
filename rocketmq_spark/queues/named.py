"""Functions that a user names as ``module:callable``, and the sentence for a name that means nothing."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from rocketmq_spark.errors import OptionError


def resolve(given: str | Callable[..., Any], option: str) -> Callable[..., Any]:
    """``given`` itself when it can be called, else what ``module:callable`` names; ``option`` is for the error."""
    if callable(given):
        return given
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
