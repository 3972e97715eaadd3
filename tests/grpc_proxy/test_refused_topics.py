"""Topics that a Proxy refuses beside others that it knows: who may is heard, and stays known."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

import pytest

from rocketmq_spark.errors import AccessDenied
from tests.grpc_proxy.test_transactions import COMMIT, HALF, soon, talking
from tests.mockbroker import eventually


@pytest.mark.parametrize("before", [False, True])
def test_a_topic_that_is_refused_does_not_silence_the_others(before: bool) -> None:
    """A user without the right, or who has it no more, hears it of this topic alone; the Proxy still asks about the others."""
    with talking() as (scripted, sender, queue):
        asked: list[str] = []
        leave = sender.join("g", 0, lambda message, place: asked.append(place.topic) or COMMIT)
        sender.send(queue, HALF, soon())
        if before:
            sender.send(queue._replace(topic="u"), HALF, soon())
        scripted.refused.add("u")
        if before:
            sender._transactions._send_heartbeats()
            eventually(lambda: sender._transactions._streams[queue.broker_name]._error is not None)
        for _ in range(2):
            with pytest.raises(AccessDenied) as caught:
                sender.send(queue._replace(topic="u"), HALF, soon())
            assert caught.value.unsent
            sender.send(queue, HALF, soon())
        assert [request.messages[0].topic.name for _, request in scripted.sent] == ["t", *["u"] * before, "t", "t"]
        assert [topic.name for topic in scripted.settings[-1].publishing.topics] == ["t"]
        scripted.ask("t")
        eventually(lambda: asked == ["t"])
        scripted.refused.clear()
        sender.send(queue._replace(topic="u"), HALF, soon())
        assert [topic.name for topic in scripted.settings[-1].publishing.topics] == ["t", "u"]
        leave(soon())


def test_topic_refused_later_is_identified_by_next_send(caplog: pytest.LogCaptureFixture) -> None:
    with talking() as (scripted, sender, queue):
        leave = sender.join("g", 0, lambda message, place: COMMIT)
        sender.send(queue._replace(topic="u"), HALF, soon())
        scripted.refused.add("u")
        sender.send(queue, HALF, soon())
        assert "rejects one of the topics ['u']" in caplog.text
        assert [topic.name for topic in scripted.settings[-1].publishing.topics] == ["t"]
        leave(soon())


def test_a_refused_topic_takes_none_from_other_threads() -> None:
    """What one names alone is accepted, or refused, without the others' topics."""
    for _ in range(10):
        with talking() as (scripted, sender, queue):
            leave = sender.join("g", 0, lambda message, place: COMMIT)
            sender.send(queue._replace(topic="old"), HALF, soon())
            scripted.refused.add("bad")
            refused: SimpleQueue[str] = SimpleQueue()
            together = threading.Barrier(4)

            def send(
                topic: str, sender: Any = sender, queue: Any = queue, refused: Any = refused, together: Any = together
            ) -> None:
                together.wait(30)
                try:
                    sender.send(queue._replace(topic=topic), HALF, soon())
                except AccessDenied:
                    refused.put(topic)

            threads = [threading.Thread(target=send, args=(topic,)) for topic in ("bad", "t", "u", "v")]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            assert (refused.get(timeout=10), refused.qsize()) == ("bad", 0)
            eventually(lambda scripted=scripted: scripted.topics() == {"old", "t", "u", "v"})
            leave(soon())


def test_accepted_topic_stays_when_another_is_announced_alone() -> None:
    """Its thread has sent by then. It was left out, and the Proxy asked nobody about that half message."""
    with talking() as (scripted, sender, queue):
        leave = sender.join("g", 0, lambda message, place: COMMIT)
        sender.send(queue._replace(topic="old"), HALF, soon())
        it = sender._transactions
        assert it._announce_alone("t", "g", queue.broker_name, soon()) is None
        scripted.refused.add("bad")
        it._announce("g", lambda topics: {**topics, "bad": ("g",)})  # another thread's, which waits for the answer
        assert it._announce_alone("u", "g", queue.broker_name, soon()) is None
        assert scripted.topics() == {"old", "t", "u"}
        leave(soon())


def test_a_topic_is_taken_in_the_step_that_finds_it_accepted() -> None:
    """Between the two another thread that names its topic alone would leave it out."""
    with talking() as (scripted, sender, queue):
        leave = sender.join("g", 0, lambda message, place: COMMIT)
        it, locked = sender._transactions, []

        class Taken(set[str]):
            def add(self, topic: str) -> None:
                locked.append(it._lock.locked())
                super().add(topic)

        it._accepted_topics = Taken()
        sender.send(queue, HALF, soon())
        assert (locked, it._accepted_topics, scripted.topics()) == ([True], {"t"}, {"t"})
        leave(soon())
