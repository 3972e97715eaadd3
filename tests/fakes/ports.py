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
            if name in answers:
                answer = answers[name]
            elif callable(getattr(behind, name, None)):
                answer = functools.partial(self._ask_behind, behind, name)
            else:
                answer = getattr(behind, name, self._unexpected(name))
            setattr(self, name, self._verb(getattr(port, name), name, answer) if callable(answer) else answer)

    def _verb(self, verb: Any, name: str, answer: Callable[..., object]) -> Callable[..., object]:
        def ask(*given: Any, **named: Any) -> object:
            _signature(verb).bind(self, *given, **named)
            self.asked.append(name)
            return answer(*given, **named)

        return ask

    def _ask_behind(self, behind: object, name: str, *given: Any, **named: Any) -> object:
        """The method may be replaced meanwhile."""
        return getattr(behind, name)(*given, **named)

    def _unexpected(self, name: str) -> Callable[..., None]:
        def ask(*given: object, **named: object) -> None:
            pytest.fail(f"{name}{given} was not expected")

        return ask


def verbs(port: type) -> set[str]:
    return {name for name in vars(port) if not name.startswith("_")}


def arguments(verb: Callable[..., object]) -> list[tuple[str, object, object]]:
    """Their types are mypy's to compare."""
    return [(one.name, one.kind, one.default) for one in inspect.signature(verb).parameters.values()]
