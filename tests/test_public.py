"""What users call says what it takes: every public class and function names each of its arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import pytest

import rocketmq_spark

# Which docstring describes the arguments that a method shares with another one.
_SHARED = re.compile(r"arguments are those of ``(\w+)``")


def public() -> Iterator[tuple[str, object]]:
    """Every public name, and the public methods and properties of classes, those of our own base classes too."""
    for name in rocketmq_spark.__all__:
        thing = getattr(rocketmq_spark, name)
        yield name, thing
        for base in inspect.getmro(thing) if inspect.isclass(thing) else ():
            if base.__module__.startswith("rocketmq_spark"):
                members = [(m, f) for m, f in vars(base).items() if not m.startswith("_")]
                yield from ((f"{name}.{m}", f) for m, f in members if inspect.isfunction(f) or isinstance(f, property))


@pytest.mark.parametrize(("name", "thing"), list(public()), ids=lambda value: value if isinstance(value, str) else "")
def test_docstrings_name_every_argument(name, thing):
    text = inspect.getdoc(thing) or ""
    assert text, f"{name} has no docstring"
    if isinstance(thing, property):
        return
    shared = _SHARED.search(text)
    if shared:
        owner = getattr(rocketmq_spark, name.partition(".")[0])
        text += inspect.getdoc(getattr(owner, shared[1])) or ""
    names = [p for p in inspect.signature(thing).parameters if p not in ("self", "args")]
    assert [p for p in names if not re.search(rf"\b{p}\b", text)] == []
