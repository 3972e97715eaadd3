"""Matches names of topics with the expression of option ``subscribePattern``.

Everyone who may create a topic chooses a name, and the time of Python's expressions grows exponentially with some names. So RE2
matches, whose time is linear. It knows neither look-around nor back references; Python matches expressions with these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rocketmq_spark.errors import OptionError
from rocketmq_spark.options.names import ALLOWED, code_allowed
from rocketmq_spark.wire import names

# Python reads these otherwise than RE2, which rejects everything else that it does not know.
_DIFFERS_IN_RE2 = re.compile(r"\{,|\[\[|\[:")


def matching(pattern: str, topics: Iterable[str]) -> list[str]:
    """The topics whose whole name matches, in their order. Raises ``OptionError`` for an expression that only Python matches if
    the operator forbids code in options: whoever chose it could keep the process busy for ever.
    """
    import pyarrow as pa  # here, because only expressions need it
    import pyarrow.compute as pc

    listed = [
        topic for topic in topics if topic.isprintable()
    ]  # single surrogates, which no topic has, are not for RE2
    if not _DIFFERS_IN_RE2.search(pattern):
        try:
            found = pc.match_substring_regex(pa.array(listed, pa.string()), pattern=rf"\A(?:{pattern})\z")
        except pa.ArrowException:  # an expression that RE2 does not know
            pass
        else:
            return [topic for topic, matches in zip(listed, found.to_pylist(), strict=True) if matches]
    if not code_allowed():
        raise OptionError(
            f"option 'subscribePattern' is {pattern!r}; RE2 cannot match it, and variable {ALLOWED} forbids other expressions",
            remedy="Give an expression without look-around, back references, possessive and atomic groups",
        )
    matches = re.compile(pattern).fullmatch
    return [topic for topic in listed if names.topic_problem(topic) is None and matches(topic)]
