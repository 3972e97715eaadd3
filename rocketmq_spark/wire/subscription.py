"""Tag expressions, as a broker's filter reads them: ``*`` or ``a || b``.

A broker compares 32-bit hashes of tags only, so what it lets through must be compared again by text. Mirrors
``FilterAPI`` of the Java client. SQL92 filters are not understood here.
"""

from __future__ import annotations

from dataclasses import dataclass

from rocketmq_spark.java_strings import string_hash

ALL = "*"

# What Java's trim() removes: everything up to the blank, but not the no-break space.
_BLANKS = "".join(map(chr, range(0x21)))


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a group wants of a topic. No tags: everything."""

    sub_string: str = ALL
    tags: tuple[str, ...] = ()
    codes: tuple[int, ...] = ()

    def accepts(self, tag: str | None) -> bool:
        """Whether a message with this tag was really asked for; brokers also pass tags with an equal hash."""
        return not self.tags or tag in self.tags


def parse_subscription(expression: str | None) -> Subscription:
    """The tags of an expression and their hashes, sorted. Raises ``ValueError`` when it consists of ``||`` only."""
    if not expression or expression == ALL:
        return Subscription()
    parts = expression.split("||")
    while parts and not parts[-1]:  # Java's split() drops these
        parts.pop()
    if not parts:
        raise ValueError(f"No tag in the expression {expression!r}")
    tags = tuple(sorted({part.strip(_BLANKS) for part in parts} - {""}))
    return Subscription(expression, tags, tuple(sorted({string_hash(tag) for tag in tags})))
