"""Secret texts, such as passwords and keys, which are hidden in output."""

from __future__ import annotations


class Secret(str):
    """A text that is hidden in output: ``repr`` and ``str`` return asterisks, ``reveal`` the value."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return "***"

    def reveal(self) -> str:
        return str.__str__(self)
