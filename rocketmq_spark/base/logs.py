"""Escapes control characters in the package's log records, and in the texts of its errors.

Servers and other clients choose names of brokers, remarks and ids of messages. After a line break in such a text, the rest
would look like another log record. Other control characters would control the terminal that shows the text.
"""

from __future__ import annotations

import codecs
import contextlib
import logging
import re
from collections.abc import Callable
from typing import Any

# Control characters except tabs and line breaks, characters that change the writing direction, line separators of some editors,
# and single surrogates, which cannot be encoded.
CONTROL_CHARACTERS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff"
_TEXT_PATTERN = re.compile(f"[{CONTROL_CHARACTERS}\n]")
_TRACEBACK_PATTERN = re.compile(f"[{CONTROL_CHARACTERS}]")
_PACKAGES = ("rocketmq_spark", "pyspark_rocketmq")


_PIECE_CHARACTERS = 1 << 16
# The codec is imported here, because ``str.encode`` would import the codec with the first text, perhaps while root has the rights
# of another user.
_encode = codecs.getencoder("unicode_escape")


def replace_characters(pattern: re.Pattern[str], replacement: Callable[[re.Match[str]], str], text: str) -> str:
    """Replace single characters, piece by piece. For a whole text, ``re.sub`` would keep two objects for each replaced character,
    and a body may have millions of these characters.
    """
    if len(text) <= _PIECE_CHARACTERS:
        return pattern.sub(replacement, text)
    return "".join(
        pattern.sub(replacement, text[start : start + _PIECE_CHARACTERS])
        for start in range(0, len(text), _PIECE_CHARACTERS)
    )


def escaped(text: str) -> str:
    """Replace line breaks and control characters by their codes, such as ``\\n``. An escaped text stays as it is."""
    return replace_characters(_TEXT_PATTERN, _escape, text)


def _escape(match: re.Match[str]) -> str:
    return _encode(match[0])[0].decode()


def escape_record(record: logging.LogRecord) -> None:
    """Escape the text of a record, and its traceback. A record without such characters keeps its arguments for handlers."""
    text = ""
    with contextlib.suppress(Exception):  # handlers report a record that cannot be formatted
        text = record.getMessage()
    if _TEXT_PATTERN.search(text):
        record.msg, record.args = escaped(text), ()
    if record.exc_info and record.exc_text is None:
        traceback = logging.Formatter().formatException(record.exc_info)
        if _TRACEBACK_PATTERN.search(traceback):
            record.exc_text = _TRACEBACK_PATTERN.sub(_escape, traceback)


def _escaping_factory(make: Callable[..., logging.LogRecord]) -> Callable[..., logging.LogRecord]:
    def make_escaped(name: str | None, *args: Any, **fields: Any) -> logging.LogRecord:
        record = make(name, *args, **fields)
        if str(name).partition(".")[0] in _PACKAGES:  # ``logging.makeLogRecord`` passes None as name
            escape_record(record)
        return record

    make_escaped.escapes = True  # type: ignore[attr-defined]
    return make_escaped


def install() -> None:
    """Escape all records of this package from now on.

    A filter of the package's logger does not see the records of its modules' loggers, and the program's logging configuration
    can remove a handler. So this function wraps the factory of log records. Records of other packages stay as they are.
    """
    make = logging.getLogRecordFactory()
    if not hasattr(make, "escapes"):
        logging.setLogRecordFactory(_escaping_factory(make))


install()  # no other call is needed, because each module that logs foreign texts imports ``errors``, which imports this module
