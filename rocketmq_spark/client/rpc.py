"""Requests to addresses: signature, deadline, many requests at once, and the error for a response code."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rocketmq_spark.base.budget import ReceiveBudget, estimated_memory
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import PULL_FORBIDDEN_REMARK, READ_FORBIDDEN_TYPES, Response
from rocketmq_spark.base.threads import Latch, start_thread
from rocketmq_spark.client.credentials import Credentials, RotatingCredentials
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerBusy,
    BrokerError,
    ConnectionLost,
    NotReadable,
    NotSupported,
    OptionError,
    RocketMQError,
    ServerFault,
    ServiceNotAvailable,
    error_for,
)
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.remoting.connection import Connection, OnResponse
from rocketmq_spark.remoting.pool import Pool
from rocketmq_spark.wire import names
from rocketmq_spark.wire.header import Command, Peer

# Brokers report these temporary conditions with the code of internal errors. Each key is the beginning of a remark. In this
# order, the remarks mean that a client sent before a configured time, that there are too few slaves, that there is no space for
# the next file, and that there are too many timers for one second.
_TRANSIENT_FAULTS: Mapping[str, type[BrokerError]] = {
    "broker unable to service": ServiceNotAvailable,
    "in-sync replicas not enough": ServiceNotAvailable,
    "create mapped file failed": ServiceNotAvailable,
    "timer message is under flow control": BrokerBusy,
}
# The message and the remedy if a name server or a Proxy does not support a request.
_NOT_SUPPORTED = {
    Peer.NAME_SERVER: (
        "the server is a name server, which answers no requests for brokers",
        "Check option 'addressMap': its value nameServer is only for a Proxy. For a port-forward per broker, give JSON such as "
        '{"10.0.0.5:10911": "localhost:10911"}',
    ),
    Peer.PROXY: (
        "the server is a Proxy, which does not forward this request",
        "Give the brokers' name server as option 'nameServer'",
    ),
}


@contextmanager
def with_proxy_remedy(remedy: str) -> Iterator[None]:
    """In the block, replace the remedy of the error for a request that a Proxy does not forward."""
    try:
        yield
    except NotSupported as e:
        if e.message == _NOT_SUPPORTED[Peer.PROXY][0]:
            e.remedy = remedy
        raise


_ACCESS_DENIED_REMEDY = (
    "Access denied: check options 'accessKey' and 'secretKey' and the user's policies "
    "(source: Sub and Get on the topic, Sub on the group; sink: Pub on the topic)"
)


# The maximum number of threads that connect at once, because a route may name thousands of addresses.
_MAX_PARALLEL_CONNECTS = 64
_FIELD_BYTES = 6  # estimated memory of a header field, besides its name and value


class _PendingAnswers:
    """Requests that were sent together, and their answers; None for an answer that has not arrived.

    All answers stay in memory until the last one has arrived. So the answers count against the client's memory budget, by
    address, until they are released. If other connections need the memory, all answers of an address become errors.
    """

    def __init__(
        self, requests: Sequence[tuple[str, Command]], receive_budget: ReceiveBudget, deadline: Deadline | None = None
    ) -> None:
        self.requests = requests
        self.deadline = deadline or Deadline.after(0)
        self.outcomes: list[Command | RocketMQError | None] = [None] * len(requests)
        self._indexes: dict[str, list[int]] = {}
        for i, (address, _) in enumerate(requests):
            self._indexes.setdefault(address, []).append(i)
        self._accounts = {
            address: receive_budget.account(address, functools.partial(self._drop, address))
            for address in self._indexes
        }
        self._released_addresses: set[str] = set()
        self._missing_count = len(requests)
        self._started_s = time.monotonic()
        self._lock = threading.Lock()
        self._all_answered_latch = Latch()
        self.stop_waiting_for(0)

    def record(self, index: int, answer: Command | RocketMQError) -> None:
        if isinstance(answer, Command):
            answer.received_s = Deadline.after(0).end_s
        self.outcomes[index] = answer  # first, because ``_drop`` must find the answer in ``outcomes``
        if isinstance(answer, Command):
            address = self.requests[index][0]
            account = self._accounts[address]
            with self._lock:
                if address in self._released_addresses:
                    self.outcomes[index] = None
                elif not account.add(_memory_of(answer)):
                    self.outcomes[index] = _dropped_answer_error(address)
        self.stop_waiting_for(1)

    def _drop(self, address: str) -> None:
        """Replace the answers of an address by errors, because other connections need the memory."""
        for i in self._indexes[address]:
            if isinstance(self.outcomes[i], Command):
                self.outcomes[i] = _dropped_answer_error(address)

    def release(self, kept_addresses: Container[str] = ()) -> None:
        """Discard the answers of all addresses but those in ``kept_addresses``, and release their memory."""
        for address, account in self._accounts.items():
            if address not in kept_addresses:
                with self._lock:
                    self._released_addresses.add(address)
                    account.resize(0)
                for i in self._indexes[address]:
                    self.outcomes[i] = None

    def stop_waiting_for(self, count: int) -> None:
        """Stop waiting for ``count`` of the answers."""
        with self._lock:
            self._missing_count -= count
            if not self._missing_count:
                self._all_answered_latch.set()

    def _extended_grace_s(self, grace_s: float | None) -> float | None:
        return None if grace_s is None else max(grace_s, (time.monotonic() - self._started_s) / 4)

    def wait(self, grace_s: float | None = None, max_missing: int = 0) -> None:
        """Wait for all answers. With ``grace_s``, return earlier if fewer than ``max_missing`` answers are missing, and no
        answer has arrived during the grace.

        The grace begins after the first real answer, because an address that refuses at once does not show how fast other
        addresses answer. The grace grows with the time that the answers take, so that a busy machine does not make brokers
        appear to hang.
        """
        earlier_missing_count = self._missing_count
        while not self._all_answered_latch.wait(self._extended_grace_s(grace_s)):
            if self._missing_count == earlier_missing_count < max_missing and any(
                isinstance(outcome, Command) for outcome in self.outcomes
            ):
                return
            earlier_missing_count = self._missing_count


def _memory_of(answer: Command) -> int:
    header_bytes = sum(len(name) + len(value) + _FIELD_BYTES for name, value in answer.ext.items())
    return estimated_memory(len(answer.body), header_bytes + len(answer.remark or ""))


def _dropped_answer_error(address: str) -> ConnectionLost:
    return ConnectionLost("an answer was dropped: other arriving frames fill the memory limit", address)


@dataclass(frozen=True, slots=True)
class RpcClient:
    """Sends requests over a pool of connections."""

    pool: Pool
    request_timeout_s: float = 3.0
    credentials: Credentials | RotatingCredentials | None = None
    scope: names.Scope = names.NO_SCOPE
    # Requests without an answer when ``invoke_with_grace`` returned, by address. The only state of this class.
    late_answers: dict[str, _PendingAnswers] = field(default_factory=dict, compare=False, repr=False)

    def name_on_wire(self, name: str) -> str:
        """The name of a topic or group on brokers. Other packages use only the user's names."""
        return self.scope.name_on_wire(name)

    def is_private(self, address: str) -> bool:
        """Whether requests to an address and their answers are encrypted or stay on this machine."""
        return self.pool.connect_options.is_private(address)

    def check_private(self, address: str, secrets_text: str, allow_plain_text: bool = False) -> None:
        """Raise ``OptionError`` if others on the network could read secrets in an exchange with an address. ``secrets_text``
        is the description of the secrets in the error.

        With ``allow_plain_text``, an explicit ``tls=false`` permits the exchange in clear text.
        """
        connect_options = self.pool.connect_options
        if connect_options.is_private(address) or (allow_plain_text and connect_options.allow_plain_text):
            return
        plain_text_remedy = ", or to false if others on the network may read them" if allow_plain_text else ""
        raise OptionError(
            f"{secrets_text} would cross the network to {connect_options.reachable_address(address)} in clear text",
            remedy=f"Set option 'tls' to true{plain_text_remedy}",
        )

    def queue_on_wire(self, queue: MessageQueue) -> MessageQueue:
        """A queue with the topic's name on brokers."""
        return queue._replace(topic=self.name_on_wire(queue.topic))

    def request(
        self,
        address: str,
        command: Command,
        deadline: Deadline | None = None,
        accepted_codes: Container[int] = (Response.SUCCESS,),
    ) -> Command:
        """Send a request. Returns the answer if its code is in ``accepted_codes``; otherwise raises the error for the code."""
        answer = self.invoke(address, command, deadline or Deadline.after(self.request_timeout_s))
        if answer.code not in accepted_codes:
            raise error_from_response(answer, address)
        return answer

    def invoke(self, address: str, command: Command, deadline: Deadline) -> Command:
        """Send a request and return its answer, with any code."""
        try:
            command = self._signed_command(command)
            connection = self.pool.get(address, deadline)
        except RocketMQError as e:
            e.unsent = True
            raise
        answer = connection.call(command, deadline)
        self._on_answer(answer, address, connection)
        return answer

    def invoke_async(self, address: str, command: Command, deadline: Deadline, done: OnResponse) -> None:
        """Send a request; call ``done`` once, on any thread, with the answer (any code) or the error. Connecting may block."""
        self._invoke_on(address, [(command, done)], deadline)

    def invoke_each(self, requests: Sequence[tuple[str, Command]], deadline: Deadline) -> list[Command | RocketMQError]:
        """Send all requests at once. Returns answers (any code) and errors, in order."""
        answers = _PendingAnswers(requests, self.pool.connect_options.receive_budget)
        try:
            self._send_each(answers, range(len(requests)), deadline)
            answers.wait()
            return [answer for answer in answers.outcomes if answer is not None]
        finally:
            answers.release()

    def invoke_with_grace(
        self, requests: Sequence[tuple[str, Command]], deadline: Deadline, grace_s: float
    ) -> list[Command | RocketMQError | None]:
        """As ``invoke_each``, but does not wait for addresses that are more than ``grace_s`` slower than the others.

        The result has None for each request to a late address. Until this address answers or ``deadline`` passes, later calls
        send it nothing, and return None again. After the answer, a call with the same requests sends them again, and returns
        the earlier answers if the new ones are late, too.
        """
        answers = _PendingAnswers(requests, self.pool.connect_options.receive_budget, deadline)
        indexes_of_address: dict[str, list[int]] = {}
        for i, (address, _) in enumerate(requests):
            indexes_of_address.setdefault(address, []).append(i)
        indexes_to_send: list[int] = []
        earlier_answers: dict[int, Command | RocketMQError] = {}
        for address, indexes in indexes_of_address.items():
            if self._is_late(address):
                answers.stop_waiting_for(len(indexes))
            else:
                earlier_answers |= self._late_answers_of(answers, indexes, address)
                indexes_to_send += indexes
        for address, pending_answers in list(self.late_answers.items()):
            if (
                pending_answers.deadline.expired and address not in indexes_of_address
            ):  # the address may have left the routes
                self._forget_late_answers(address, pending_answers)
        outcomes: list[Command | RocketMQError | None] = []
        late_addresses: set[str] = set()
        try:
            self._send_each(answers, indexes_to_send, deadline)
            answers.wait(grace_s, len(indexes_to_send))
            outcomes += answers.outcomes
            late_addresses |= {requests[i][0] for i in indexes_to_send if outcomes[i] is None}
        finally:
            answers.release(kept_addresses=late_addresses)
        self.late_answers.update(dict.fromkeys(late_addresses, answers))
        return [earlier_answers.get(i) if outcome is None else outcome for i, outcome in enumerate(outcomes)]

    def _is_late(self, address: str) -> bool:
        """Whether an address still owes an answer to a request of an earlier ``invoke_with_grace``."""
        pending_answers = self.late_answers.get(address)
        return pending_answers is not None and any(
            outcome is None
            for (a, _), outcome in zip(pending_answers.requests, pending_answers.outcomes, strict=True)
            if a == address
        )

    def _late_answers_of(
        self, answers: _PendingAnswers, indexes: Sequence[int], address: str
    ) -> dict[int, Command | RocketMQError]:
        """Take the late answers of an address, by index, if the earlier requests equal the new ones."""
        pending_answers = self.late_answers.get(address)
        if pending_answers is None:
            return {}
        earlier_outcomes = [
            (command, outcome)
            for (a, command), outcome in zip(pending_answers.requests, pending_answers.outcomes, strict=True)
            if a == address
        ]
        self._forget_late_answers(address, pending_answers)
        if [_request_content(command) for command, _ in earlier_outcomes] != [
            _request_content(answers.requests[i][1]) for i in indexes
        ]:
            return {}
        return {i: outcome for i, (_, outcome) in zip(indexes, earlier_outcomes, strict=True) if outcome is not None}

    def _forget_late_answers(self, address: str, answers: _PendingAnswers) -> None:
        if self.late_answers.pop(address, None) is answers:
            answers.release(kept_addresses=[a for a, other in list(self.late_answers.items()) if other is answers])

    def _send_each(self, answers: _PendingAnswers, indexes: Iterable[int], deadline: Deadline) -> None:
        """Send the requests with these indexes. Connects to up to ``_MAX_PARALLEL_CONNECTS`` addresses in parallel."""
        calls_of_address: dict[str, list[tuple[Command, OnResponse]]] = {}
        for i in indexes:
            address, command = answers.requests[i]
            calls_of_address.setdefault(address, []).append((command, functools.partial(answers.record, i)))
        waiting_sends = deque[functools.partial[None]]()
        for address, calls in calls_of_address.items():
            if len(calls_of_address) == 1 or self.pool.is_connected(address):
                self._invoke_on(address, calls, deadline)
            else:
                waiting_sends.append(functools.partial(self._invoke_on, address, calls, deadline))

        def connect_in_turn() -> None:
            while True:
                try:
                    send = waiting_sends.popleft()
                except IndexError:
                    return
                send()

        for _ in range(min(_MAX_PARALLEL_CONNECTS, len(waiting_sends))):
            try:
                start_thread("rocketmq-dial", connect_in_turn, restart=False)
            except RuntimeError:  # no more threads: connect one after the other
                connect_in_turn()

    def _invoke_on(self, address: str, calls: Sequence[tuple[Command, OnResponse]], deadline: Deadline) -> None:
        try:
            signed_commands = [self._signed_command(command) for command, _ in calls]
            connection = self.pool.get(address, deadline, wait_for_backoff=False)
        except RocketMQError as e:
            e.unsent = True
            for _, done in calls:
                done(e)
            return

        def on_answer(done: OnResponse, answer: Command | RocketMQError) -> None:
            if not isinstance(answer, RocketMQError):
                self._on_answer(answer, address, connection)
            done(answer)

        callbacks = (functools.partial(on_answer, done) for _, done in calls)
        connection.call_each(list(zip(signed_commands, callbacks, strict=True)), deadline)

    def invoke_oneway(self, address: str, command: Command, deadline: Deadline | None = None) -> None:
        """Send a one-way request."""
        deadline = deadline or Deadline.after(self.request_timeout_s)
        command = self._signed_command(command)
        self.pool.get(address, deadline).send_oneway(command, deadline)

    def _signed_command(self, command: Command) -> Command:
        return self.credentials.sign(command) if self.credentials else command

    def _on_answer(self, answer: Command, address: str, connection: Connection) -> None:
        """Retire the connection of a server that shuts down, because the server rejects requests on this connection, but not on
        new connections.
        """
        if answer.code == Response.GO_AWAY:
            self.pool.retire(address, connection)


def _request_content(command: Command) -> tuple[int, dict[str, str], bytes]:
    """The content of a request without its number, to compare requests."""
    return command.code, command.ext, bytes(command.body)


def error_from_response(
    answer: Command, address: str, topic: str | None = None, queue: str | None = None
) -> RocketMQError:
    """Return the error for an answer whose code is not SUCCESS."""
    error_class = error_for(answer.code, answer.remark or "")
    if answer.code == Response.REQUEST_CODE_NOT_SUPPORTED and answer.peer in _NOT_SUPPORTED:
        message, remedy = _NOT_SUPPORTED[answer.peer]
        return NotSupported(message, address, answer.code, topic, queue, (answer.remark or "").strip() or None, remedy)
    if issubclass(error_class, ServerFault):
        remark_text = answer.remark or ""
        error_class = next(
            (fault for prefix, fault in _TRANSIENT_FAULTS.items() if remark_text.startswith(prefix)), error_class
        )
    forbidden_type = answer.ext.get("forbiddenType")
    is_unreadable = (
        forbidden_type in map(str, READ_FORBIDDEN_TYPES)
        if forbidden_type is not None
        else PULL_FORBIDDEN_REMARK in (answer.remark or "")
    )
    if answer.code == Response.NO_PERMISSION and is_unreadable:
        error_class = NotReadable
    is_denied = issubclass(error_class, AccessDenied) and forbidden_type is None
    # Servers append a pointer to their documentation on further lines.
    remark = (answer.remark or "").split("\n", 1)[0].strip() or None
    message = "access denied" if is_denied else "the server refused the request"
    return error_class(
        message, address, answer.code, topic, queue, remark, _ACCESS_DENIED_REMEDY if is_denied else None
    )
