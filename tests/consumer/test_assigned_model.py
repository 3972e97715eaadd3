"""Queues of a pull consumer, against a model: what a poll gave last is never among what may be committed."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from rocketmq_spark.consumer.assigned import ONE_ANSWER, AssignedQueues, FetchedPart, FetchRequest
from rocketmq_spark.consumer.rebalance import StartOffset
from rocketmq_spark.model import MessageQueue, PullAnswer, PullStatus
from tests.consumer.test_assigned import A, B, found
from tests.models import SteppingMachine, model_test, step
from tests.scale import examples

QUEUES = st.sampled_from([A, B])


class Machine(SteppingMachine):
    """Queues are pulled, polled, finished, committed, paused; polls are interrupted, and loops left in the middle. The model is
    a list of what was given.
    """

    @initialize()
    def begin(self) -> None:
        self.one = AssignedQueues(4)
        self.one.assign({A: StartOffset(0), B: StartOffset(0)})
        self.under_way: list[FetchRequest] = []
        self.given: dict[MessageQueue, list[int]] = {A: [], B: []}
        self.passed: dict[MessageQueue, set[int]] = {A: set(), B: set()}
        self.last: dict[MessageQueue, int] = {A: 0, B: 0}

    @step()
    def pull(self) -> None:
        self.under_way += self.one.due_requests(0.0)
        queues = [ask.queue for ask in self.under_way]
        assert len(queues) == len(set(queues))

    def next_ask(self) -> FetchRequest | None:
        """A pull that is under way, or one that is made now; None while too much waits."""
        if not self.under_way:
            self.pull()
        return self.under_way.pop(0) if self.under_way else None

    @step(count=st.integers(1, 3), fails=st.booleans())
    def answer(self, count: int, fails: bool) -> None:
        if (ask := self.next_ask()) is None:
            return
        self.did["failed" if fails else "answered"] += 1
        assert self.one.on_failure(ask, 0.0) if fails else self.one.on_answer(ask, found(ask, count))

    @step(count=st.integers(1, 2))
    def pass_over(self, count: int) -> None:
        """Nothing of the next offsets is wanted."""
        if (ask := self.next_ask()) is not None:
            self.did["passed_over"] += 1
            end = ask.offset + count
            assert self.one.on_answer(ask, PullAnswer(PullStatus.NO_MATCHED_MSG, end, 0, 99))
            self.passed[ask.queue] |= set(range(ask.offset, end))

    @step(sizes=st.lists(st.integers(1, 2), min_size=2, max_size=3))
    def read_ahead(self, sizes: list[int]) -> None:
        """Several answers arrive as one part."""
        if (ask := self.next_ask()) is not None:
            self.did["read_ahead"] += 1
            ends = [(ask.offset + end, end) for end in itertools.accumulate(sizes)]
            stored = bytes(ends[-1][1])
            assert self.one.accept(ask, FetchedPart(ask.queue, ask.offset, ends, stored, lambda start, end, stored: []))
            self.one.release([ask], 0.0)

    def begin_poll(self) -> None:
        self.one.ready_parts.take_back()
        self.one.finish_returned_messages()
        self.last = {queue: len(self.given[queue]) for queue in (A, B)}

    @step(most=st.integers(ONE_ANSWER, 3), interrupted=st.booleans())
    def poll(self, most: int, interrupted: bool) -> None:
        """Finishes what came before; what it gives is not finished, and what it does not come to give is not given."""
        self.begin_poll()
        for part in self.one.ready_parts.take(most):
            self.did["interrupted" if interrupted else "polled"] += 1
            if not interrupted:
                self.given[part.queue] += self.messages(part)
        if not interrupted:
            self.one.ready_parts.mark_returned()

    @step(most=st.integers(0, 7))
    def loop(self, most: int) -> None:
        """A loop over messages, which is left after so many."""
        self.begin_poll()
        for part in self.one.ready_parts.take(1):
            messages = self.messages(part)
            self.did["loops_left" if most <= len(messages) else "loops"] += 1
            for offset in messages[:most]:
                assert self.one.ready_parts.may_return(part)
                self.one.ready_parts.mark_returned_up_to(offset + 1)
                self.given[part.queue].append(offset)
            if most > len(messages):
                assert self.one.ready_parts.may_return(part)
                self.one.ready_parts.mark_returned()

    def messages(self, part: FetchedPart) -> list[int]:
        return [
            offset for offset in range(part.first_offset, part.next_offset) if offset not in self.passed[part.queue]
        ]

    @step(queue=QUEUES, paused=st.booleans())
    def pause(self, queue: MessageQueue, paused: bool) -> None:
        self.one.pause([queue], paused)

    @step(queue=QUEUES)
    def commit(self, queue: MessageQueue) -> None:
        self.one.mark_committed({q: offset for q, offset in self.one.offsets_to_commit().items() if q == queue})

    @invariant()
    def every_offset_is_given_once_and_in_order(self) -> None:
        for queue, given in self.given.items():
            wanted = [offset for offset in range(999) if offset not in self.passed[queue]]
            assert given == wanted[: len(given)]

    @invariant()
    def what_the_last_poll_gave_is_not_committed(self) -> None:
        """Nor what waits, whatever was passed over behind it."""
        for queue, done in self.one.offsets_to_commit().items():
            assert set(range(done)) <= {*self.given[queue][: self.last[queue]], *self.passed[queue]}

    @invariant()
    def what_waits_is_counted(self) -> None:
        ready = self.one.ready_parts._parts
        for queue, place in self.one.states.items():
            assert place.cached_count == sum(part.offset_count for part in ready if part.queue == queue)

    def teardown(self) -> None:
        """Once everything was polled everything may be committed, what was passed over behind it, too."""
        self.one.pause([A, B], False)
        for _ in range(3):
            self.one.ready_parts.take_back()
            self.one.ready_parts.take(99)
            self.one.ready_parts.mark_returned()
        self.one.finish_returned_messages()
        assert all(place.finished_offset == place.pull_offset for place in self.one.states.values())


TestMachine = model_test(
    Machine,
    settings(max_examples=examples(200), stateful_step_count=30, deadline=None),
    polled=5,
    interrupted=5,
    loops=5,
    loops_left=5,
    read_ahead=20,
)
