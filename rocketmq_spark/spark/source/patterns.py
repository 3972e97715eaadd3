"""Matches names of topics with the expression of option ``subscribePattern``.

Everyone who may create a topic chooses a name, and the time of Python's expressions grows exponentially with some names. So RE2
matches, whose time is linear. It knows neither look-around nor back references; Python matches expressions with these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rocketmq_spark.wire import names

# Python reads these otherwise than RE2, which rejects everything else that it does not know.
_READ_OTHERWISE = re.compile(r"\{,|\[\[|\[:")


def matching(pattern: str, topics: Iterable[str]) -> list[str]:
    """The topics whose whole name matches, in their order."""
    import pyarrow as pa  # here, because only expressions need it
    import pyarrow.compute as pc

    listed = list(topics)
    if not _READ_OTHERWISE.search(pattern):
        try:
            found = pc.match_substring_regex(pa.array(listed, pa.string()), pattern=rf"\A(?:{pattern})\z")
        except (pa.ArrowException, UnicodeEncodeError):  # an expression or a name that is not for RE2
            pass
        else:
            return [topic for topic, matches in zip(listed, found.to_pylist(), strict=True) if matches]
    matches = re.compile(pattern).fullmatch
    return [topic for topic in listed if names.topic_problem(topic) is None and matches(topic)]
