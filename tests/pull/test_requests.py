"""The pulls that a read sends: numbers, and keys that change."""

from __future__ import annotations

import pytest

from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.pull.pacing import PullPacing, PullRequests, PullSettings
from rocketmq_spark.pull.pending import PendingOffsets, PendingRange
from rocketmq_spark.remoting.bulk import PullTemplate
from rocketmq_spark.wire import header
from tests.pull.pull_model import pull_of

QUEUES = [MessageQueue("t", "b", i) for i in range(2)]


def missing() -> PendingOffsets:
    return PendingOffsets([OffsetRange(QUEUES[0], 5, 15), OffsetRange(QUEUES[1], 0, 100)])


def requests(keys: list[str] | None = None) -> PullRequests:
    credentials = None if keys is None else lambda: (keys[-1], "secret", None)
    return PullRequests([PullTemplate(pull_of(queue), credentials) for queue in QUEUES])


def asked(frames: list[bytes]) -> list[tuple[int, int, int, int]]:
    commands = [header.decode(frame[4:]) for frame in frames]
    return [(c.opaque, *(int(c.ext[name]) for name in ("queueId", "queueOffset", "maxMsgNums"))) for c in commands]


def test_lowest_missing_offsets_are_pulled_first_and_no_others() -> None:
    sender, todo = requests(), missing()
    assert asked(sender.next_frames(todo, PullPacing(PullSettings()), 3, 8)) == [
        (0, 0, 5, 8),
        (1, 0, 13, 2),
        (2, 1, 0, 8),
    ]
    assert asked(sender.next_frames(todo, PullPacing(PullSettings()), 1, 4)) == [(3, 1, 8, 4)]
    assert (sender.sent_count, todo.pulls_in_flight, todo.finish_pull(1)) == (4, 4, PendingRange(0, 13, 15))


def test_numbers_begin_anew_before_they_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocketmq_spark.pull.pacing._MAX_OPAQUE", 3)
    sender, todo = requests(), missing()
    numbers = [
        number for _ in range(3) for number, *_ in asked(sender.next_frames(todo, PullPacing(PullSettings()), 2, 4))
    ]
    assert numbers == [0, 1, 0, 1, 0, 1]


def test_refused_request_is_signed_with_keys_changed_since() -> None:
    keys = ["old"]
    sender, todo, pacing = requests(keys), missing(), PullPacing(PullSettings())
    sender.next_frames(todo, pacing, 2, 4)
    assert not sender.has_newer_keys(0)
    keys.append("new")
    assert sender.has_newer_keys(0)  # taken now
    assert sender.has_newer_keys(1)  # was sent with the old ones
    (frame,) = sender.next_frames(todo, pacing, 1, 4)
    assert header.decode(frame[4:]).ext["AccessKey"] == "new"
    assert not sender.has_newer_keys(2)


def test_keys_of_all_ranges_are_taken_at_once() -> None:
    keys = ["old"]
    sender, todo = requests(keys), missing()
    keys.append("new")
    sender.has_newer_keys(0)
    frames = sender.next_frames(todo, PullPacing(PullSettings()), 3, 8)
    assert {header.decode(frame[4:]).ext["AccessKey"] for frame in frames} == {"new"}
