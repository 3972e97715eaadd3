"""Finds messages of a topic that was deleted and created again after a read was planned.

The queues of the new topic begin at offset 0, so they may have messages at the planned offsets. The plan of the next batch
notices the new topic, and the next batch reads the new topic from its start. If the current read also returned a message of the
new topic, the message would be read twice.

Every message of the new topic is younger than all messages of the old topic. Therefore, an answer is suspicious if its first
message is younger than the newest message that the plan saw. If a broker's clock was set back, an answer of the old topic may
be suspicious, too, so a request to the broker decides. For all other answers, the check is one comparison of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.pull.fetched import FetchedAnswer

# Positions in a stored message: the flags, and the store time, which follows the host of the sender.
_FLAGS_POSITION, _STORE_TIME_POSITION, _IPV6_EXTRA_BYTES = 36, 56, 12
_MIN_READABLE_BYTES = _STORE_TIME_POSITION + _IPV6_EXTRA_BYTES + 8
_BORN_IPV6 = int(SysFlag.BORNHOST_V6)
_BYTE_OFFSETS = np.arange(8)
_MAX_STORE_TIME_MS = np.iinfo(np.int64).max

Buffer = npt.NDArray[np.uint8]


def store_times_ms(buffer: Buffer, begins: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
    """Return the store times of the messages that begin at the positions ``begins``."""
    is_ipv6 = (_numbers(buffer, begins + _FLAGS_POSITION, 4) & _BORN_IPV6) != 0
    return _numbers(buffer, begins + (_STORE_TIME_POSITION + is_ipv6 * _IPV6_EXTRA_BYTES), 8)


def _numbers(buffer: Buffer, positions: npt.NDArray[np.intp], size: int) -> npt.NDArray[Any]:
    numbers: npt.NDArray[Any] = buffer[positions[:, None] + _BYTE_OFFSETS[:size]].view(f">i{size}")[:, 0]
    return numbers


class RecreatedTopics:
    """Finds answers of recreated topics in one read of ``ranges``.

    ``newest_store_ms`` is the store time of the newest message that the plan saw, by range; 0 if it is unknown. ``confirm``
    asks the broker whether the topic of a queue was created again; it is called once for each suspicious queue.
    """

    def __init__(
        self, ranges: Sequence[OffsetRange], newest_store_ms: Sequence[int], confirm: Callable[[MessageQueue], bool]
    ) -> None:
        self._ranges = ranges
        self._newest_store_ms = np.array([ms or _MAX_STORE_TIME_MS for ms in newest_store_ms], np.int64)
        self._confirm = confirm
        self._is_recreated_by_queue: dict[MessageQueue, bool] = {}

    def find(self, buffer: Buffer, answers: Sequence[FetchedAnswer]) -> list[FetchedAnswer]:
        """Return the ``answers`` that have messages of recreated topics."""
        if not answers:
            return []
        # The answers are checked together, as arrays, because a million messages may come in 30,000 answers.
        range_numbers, _, _, _, begin, end = zip(*answers, strict=True)
        begins = np.array(begin, np.intp)
        # Answers that are too short are left out, because the decoder reports them.
        is_readable = np.array(end, np.intp) - begins >= _MIN_READABLE_BYTES
        if not is_readable.all():
            return self.find(buffer, [answers[i] for i in np.flatnonzero(is_readable).tolist()])
        is_younger = store_times_ms(buffer, begins) > self._newest_store_ms[np.array(range_numbers, np.intp)]
        suspicious_answers = [answers[i] for i in np.flatnonzero(is_younger).tolist()]
        return [answer for answer in suspicious_answers if self._is_recreated(self._ranges[answer.range_number].queue)]

    def _is_recreated(self, queue: MessageQueue) -> bool:
        if queue not in self._is_recreated_by_queue:
            self._is_recreated_by_queue[queue] = self._confirm(queue)
        return self._is_recreated_by_queue[queue]
