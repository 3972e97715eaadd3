"""A fake of any port, which has the methods of the port and nothing beside them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

_signature = functools.cache(inspect.signature)


class Fake:
    """A port whose methods answer as they are told, else as ``behind`` does; a method without an answer fails the test.

    Each call must have the arguments of the port. ``asked`` has the names of the methods that were called.
    """

    def __init__(self, port: type, behind: object = None, **answers: object) -> None:
        assert answers.keys() <= verbs(port)
        self.asked: list[str] = []
        for name in verbs(port):
            answer = answers.get(name, getattr(behind, name, None))
            if name not in answers and (answer is None or callable(answer)):
                answer = functools.partial(self._ask_behind, behind, name)
            setattr(self, name, self._verb(getattr(port, name), name, answer) if callable(answer) else answer)

    def _verb(self, verb: Any, name: str, answer: Callable[..., object]) -> Callable[..., object]:
        def ask(*given: Any, **named: Any) -> object:
            _signature(verb).bind(self, *given, **named)
            self.asked.append(name)
            return answer(*given, **named)

        return ask

    def _ask_behind(self, behind: object, name: str, *given: Any, **named: Any) -> object:
        """A test may have set or replaced the method since the fake was made."""
        if not hasattr(behind, name):
            pytest.fail(f"{name}{given} was not expected")
        return getattr(behind, name)(*given, **named)


def verbs(port: type) -> set[str]:
    return {name for name in vars(port) if not name.startswith("_")}


def arguments(verb: Callable[..., object]) -> list[tuple[str, object, object]]:
    """Their types are mypy's to compare."""
    return [(one.name, one.kind, one.default) for one in inspect.signature(verb).parameters.values()]
