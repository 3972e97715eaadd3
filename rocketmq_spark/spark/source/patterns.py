"""Matches names of topics with the expression of option ``subscribePattern``.

Everyone who may create a topic chooses its name, and with some names Python's matching takes exponential time. So RE2 matches,
which takes linear time. RE2 supports neither look-around nor back references, so Python matches expressions with these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rocketmq_spark.base.codes import MAX_RETRY_OR_DLQ_TOPIC_LENGTH
from rocketmq_spark.errors import OptionError
from rocketmq_spark.options.names import ALLOWED, code_allowed

# Python and RE2 give these different meanings. RE2 rejects all other syntax that it does not support.
_DIFFERS_IN_RE2 = re.compile(r"\{,|\[\[|\[:")


def matching_names(pattern: str, topics: Iterable[str]) -> list[str]:
    """Return the topics whose whole name matches, in their order.

    Raises ``OptionError`` for an expression that only Python matches if the operator forbids code in options: the author of the
    expression could keep the process busy for ever.
    """
    import pyarrow as pa  # here, because only expressions need it
    import pyarrow.compute as pc

    # No topic has single surrogates in its name, and RE2 cannot match them.
    encodable = [topic for topic in topics if topic.isprintable()]
    if not _DIFFERS_IN_RE2.search(pattern):
        try:
            found = pc.match_substring_regex(pa.array(encodable, pa.string()), pattern=rf"\A(?:{pattern})\z")
        except pa.ArrowException:  # an expression that RE2 does not support
            pass
        else:
            return [topic for topic, matches in zip(encodable, found.to_pylist(), strict=True) if matches]
    if not code_allowed():
        raise OptionError(
            f"option 'subscribePattern' is {pattern!r}; RE2 cannot match it, and variable {ALLOWED} forbids other expressions",
            remedy="Give an expression without look-around, back references, possessive and atomic groups, '{,', '[[' and '[:'",
        )
    matches = re.compile(pattern).fullmatch
    return [topic for topic in encodable if len(topic) <= MAX_RETRY_OR_DLQ_TOPIC_LENGTH and matches(topic)]
