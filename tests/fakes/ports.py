"""A fake of any port, which has the port's verbs and nothing beside them; and the arguments of verbs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest


class Fake:
    """A port whose verbs answer as they are told, and nothing beside it: what is not in the port is not there."""

    def __init__(self, port: type, **answers: object) -> None:
        assert answers.keys() <= verbs(port)
        self.asked: list[str] = []
        for name in verbs(port):
            setattr(self, name, self._verb(name, answers[name]) if name in answers else self._unexpected(name))

    def _verb(self, name: str, answer: object) -> object:
        if not callable(answer):
            return answer

        def ask(*given: Any, **named: Any) -> object:
            self.asked.append(name)
            return answer(*given, **named)

        return ask

    def _unexpected(self, name: str) -> Callable[..., None]:
        def ask(*given: object, **named: object) -> None:
            pytest.fail(f"{name}{given} was not expected")

        return ask


def verbs(port: type) -> set[str]:
    return {name for name in vars(port) if not name.startswith("_")}


def arguments(verb: Callable[..., object]) -> list[tuple[str, object, object]]:
    """Their types are mypy's to compare."""
    return [(one.name, one.kind, one.default) for one in inspect.signature(verb).parameters.values()]
