"""One request to one address: signature, deadline, and the error for the broker's response code.

Keys are fixed, or come from a file or function that is read again regularly.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rocketmq_spark.base.budget import Arrivals, memory_of
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import PULLS_FORBIDDEN, UNREADABLE, Response
from rocketmq_spark.base.folders import has_own_rights
from rocketmq_spark.base.threads import Failure, Latch, attempt, start_thread
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerBusy,
    BrokerError,
    ConnectionLost,
    LocalProtocolError,
    NotReadable,
    NotSupported,
    OptionError,
    RocketMQError,
    ServerFault,
    ServiceNotAvailable,
    error_for,
)
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import Options, paths
from rocketmq_spark.options.names import resolve
from rocketmq_spark.remoting.connection import Connection, Done
from rocketmq_spark.remoting.pool import Pool
from rocketmq_spark.wire import header, names
from rocketmq_spark.wire.header import Command, Peer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Credentials:
    """The keys that sign requests. Never printed."""

    access_key: str
    secret_key: str
    security_token: str | None = None

    def __repr__(self) -> str:
        return f"Credentials(access_key={self.access_key!r})"

    def current(self) -> Credentials:
        return self

    def sign(self, command: Command) -> Command:
        try:
            return header.sign(command, self.access_key, self.secret_key, self.security_token)
        except UnicodeEncodeError as e:
            raise LocalProtocolError(f"request {command.code} cannot be signed: {e}") from e


# Pause after a failed fetch, while the previous keys are used.
FETCH_RETRY_S = 5.0


class RotatingCredentials:
    """Credentials that are fetched again when they are a minute old, because they may be temporary. If the fetch fails, as while
    a file is being written, the old ones stay in use: servers reject keys that are no longer valid.
    """

    def __init__(self, fetch: Callable[[], Credentials], max_age_s: float = 60.0) -> None:
        self._fetch = fetch
        self._max_age_s = max_age_s
        self._known: tuple[float, Credentials] | None = None  # with the time of the next fetch

    def current(self) -> Credentials:
        known = self._known
        if known is None:
            known = self._known = time.monotonic() + self._max_age_s, self._fetched()
        elif time.monotonic() > known[0] and has_own_rights():
            known = self._known = self._renewed(known[1])
        return known[1]

    def _renewed(self, before: Credentials) -> tuple[float, Credentials]:
        try:
            return time.monotonic() + self._max_age_s, self._fetched()
        except RocketMQError as e:
            logger.warning("the previous keys stay in use: %s", e)
            return time.monotonic() + FETCH_RETRY_S, before

    def _fetched(self) -> Credentials:
        found = attempt(self._fetch)  # user code; callers get only RocketMQError
        if not isinstance(found, Failure):
            return found
        if isinstance(found.error, RocketMQError):
            raise found.error
        raise OptionError(
            f"credentials cannot be had: {type(found.error).__name__}",
            remedy="Look at option 'credentialsProvider' or 'credentialsFile'",
        ) from found.error

    def sign(self, command: Command) -> Command:
        return self.current().sign(command)


def from_provider(found: object) -> Credentials:
    """Convert the result of a user's function: (access key, secret key, optional token), or a mapping with these names."""
    if isinstance(found, Mapping):
        found = (found.get("accessKey"), found.get("secretKey"), found.get("securityToken"))
    parts = tuple(found) if isinstance(found, Sequence) and not isinstance(found, str) else ()
    access, secret, token = (*parts, None, None, None)[:3]
    if not isinstance(access, str) or not isinstance(secret, str) or not isinstance(token, str | None):
        raise OptionError(
            "the function of option 'credentialsProvider' returned no credentials; "
            "expected (access key, secret key) or (access key, secret key, token)"
        )
    return Credentials(access, secret, token)


def from_file(path: Path) -> Credentials:
    """Read lines ``accessKey=…``, ``secretKey=…`` and optionally ``securityToken=…``."""
    try:
        lines = [line.strip() for line in paths.read(path, "credentialsFile").decode("utf-8").splitlines()]
    except OSError as e:
        raise OptionError(f"option 'credentialsFile' is {str(path)!r}; it cannot be read: {e.strerror}") from e
    found = dict(line.partition("=")[::2] for line in lines if line and not line.startswith("#"))
    values = {name.strip(): value.strip() for name, value in found.items()}
    access, secret = values.get("accessKey"), values.get("secretKey")
    if not access or not secret:
        raise OptionError(f"option 'credentialsFile' is {str(path)!r}; expected lines accessKey=… and secretKey=…")
    return Credentials(access, secret, values.get("securityToken"))


def credentials_of(options: Options) -> Credentials | RotatingCredentials | None:
    """Keys from the options, or from a file or function that is read again regularly."""
    if options.credentials_provider is not None:
        provider = resolve(options.credentials_provider, "credentialsProvider")
        return RotatingCredentials(lambda: from_provider(provider()))
    if options.credentials_file is not None:
        path = paths.expanded(options.credentials_file, "credentialsFile")
        return RotatingCredentials(functools.partial(from_file, path))
    if options.access_key is None or options.secret_key is None:
        return None
    token = options.security_token
    return Credentials(options.access_key, options.secret_key.reveal(), token.reveal() if token else None)


# Temporary conditions that a broker reports with the code of its internal exceptions: sends before a configured time, too few
# slaves, no space for the next file, and too many timers for one second.
_TRANSIENT_FAULTS: Mapping[str, type[BrokerError]] = {
    "broker unable to service": ServiceNotAvailable,
    "in-sync replicas not enough": ServiceNotAvailable,
    "create mapped file failed": ServiceNotAvailable,
    "timer message is under flow control": BrokerBusy,
}
# The message and the remedy if a server other than a broker does not know a request, by kind of server.
_NOT_SUPPORTED = {
    Peer.NAME_SERVER: (
        "the server is a name server, which answers no requests for brokers",
        "Check option 'addressMap': nameServer is for a Proxy as name server; for a port-forward per broker give JSON such as "
        '{"10.0.0.5:10911": "localhost:10911"}',
    ),
    Peer.PROXY: (
        "the server is a Proxy, which does not forward this request",
        "Give the brokers' name server as option 'nameServer'",
    ),
}


@contextmanager
def with_proxy_remedy(remedy: str) -> Iterator[None]:
    """Replace the remedy of requests that a Proxy does not forward: the usual remedy names another server."""
    try:
        yield
    except NotSupported as e:
        if e.message == _NOT_SUPPORTED[Peer.PROXY][0]:
            e.remedy = remedy
        raise


_DENIED = (
    "Access denied: check options 'accessKey' and 'secretKey' and the user's policies "
    "(source: Sub and Get on the topic, Sub on the group; sink: Pub on the topic)"
)


# A route may name thousands of addresses.
_MAX_PARALLEL_CONNECTS = 64
_FIELD_BYTES = 6  # bytes, besides name and value


class _PendingAnswers:
    """Requests that were sent together, and their answers; None for an answer that has not arrived.

    Complete answers stay in the account of what arrives, by address, until they are released: the first of many waits for the
    last one. If others need the room, all answers of an address become errors.
    """

    def __init__(
        self, asked: Sequence[tuple[str, Command]], arriving: Arrivals, deadline: Deadline | None = None
    ) -> None:
        self.asked = asked
        self.deadline = deadline or Deadline.after(0)
        self.outcomes: list[Command | RocketMQError | None] = [None] * len(asked)
        self._of_address: dict[str, list[int]] = {}
        for i, (address, _) in enumerate(asked):
            self._of_address.setdefault(address, []).append(i)
        self._accounts = {
            address: arriving.of(address, functools.partial(self._drop, address)) for address in self._of_address
        }
        self._released: set[str] = set()
        self._left = len(asked)
        self._begun_s = time.monotonic()
        self._counting = threading.Lock()
        self._all_answered = Latch()
        self.skip(0)

    def tell(self, i: int, answer: Command | RocketMQError) -> None:
        if isinstance(answer, Command):
            answer.received_s = Deadline.after(0).at
        self.outcomes[i] = answer  # before it is counted: then whoever revokes the account finds it
        if isinstance(answer, Command):
            address = self.asked[i][0]
            account = self._accounts[address]
            with self._counting:
                if address in self._released:
                    self.outcomes[i] = None
                elif not account.add(_memory_of(answer)):
                    self.outcomes[i] = _answer_dropped(address)
        self.skip(1)

    def _drop(self, address: str) -> None:
        """Others need the room of an address's answers."""
        for i in self._of_address[address]:
            if isinstance(self.outcomes[i], Command):
                self.outcomes[i] = _answer_dropped(address)

    def release(self, but: Container[str] = ()) -> None:
        """Forget the answers of all addresses ``but`` these, and take them out of the account."""
        for address, account in self._accounts.items():
            if address not in but:
                with self._counting:
                    self._released.add(address)
                    account.resize(0)
                for i in self._of_address[address]:
                    self.outcomes[i] = None

    def skip(self, count: int) -> None:
        """Stop waiting for ``count`` of the answers."""
        with self._counting:
            self._left -= count
            if not self._left:
                self._all_answered.set()

    def _grown(self, grace_s: float | None) -> float | None:
        return None if grace_s is None else max(grace_s, (time.monotonic() - self._begun_s) / 4)

    def wait(self, grace_s: float | None = None, max_left: int = 0) -> None:
        """Wait for all answers. With ``grace_s``, wait only that long for the last ones, once fewer than ``max_left`` are left.

        Addresses that refuse at once do not show how soon the others can answer. If tens of thousands of answers take
        seconds, ``grace_s`` grows with them, so that a machine that is busy for a moment does not make brokers appear to hang.
        """
        left = self._left
        while not self._all_answered.wait(self._grown(grace_s)):
            if self._left == left < max_left and any(isinstance(one, Command) for one in self.outcomes):
                return
            left = self._left


def _memory_of(answer: Command) -> int:
    header = sum(len(name) + len(value) + _FIELD_BYTES for name, value in answer.ext.items())
    return memory_of(len(answer.body), header + len(answer.remark or ""))


def _answer_dropped(address: str) -> ConnectionLost:
    return ConnectionLost("an answer was dropped: others that arrive fill the memory that they may have", address)


@dataclass(frozen=True, slots=True)
class RpcClient:
    """Requests over a pool of connections."""

    pool: Pool
    request_timeout_s: float = 3.0
    credentials: Credentials | RotatingCredentials | None = None
    scope: names.Scope = names.NO_SCOPE
    # Addresses that did not answer in time, with the requests that they may still answer.
    late: dict[str, _PendingAnswers] = field(default_factory=dict, compare=False, repr=False)

    def on_wire(self, name: str) -> str:
        """The name of a topic or group on brokers. Rooms that use this one have only the user's names."""
        return self.scope.on_wire(name)

    def is_private(self, address: str) -> bool:
        """Whether requests to an address and their answers are encrypted or stay on this machine."""
        return self.pool.dialling.is_private(address)

    def check_private(self, address: str, secrets: str, allow_plain_text: bool = False) -> None:
        """Raise ``OptionError`` if the network could read the ``secrets`` of an exchange with an address. With
        ``allow_plain_text``, an explicit ``tls=false`` permits that.
        """
        dialling = self.pool.dialling
        if dialling.is_private(address) or (allow_plain_text and dialling.allow_plain_text):
            return
        other = ", or to false if others on the network may read them" if allow_plain_text else ""
        raise OptionError(
            f"{secrets} would cross the network to {dialling.reachable(address)} in clear text",
            remedy=f"Set option 'tls' to true{other}",
        )

    def queue_on_wire(self, queue: MessageQueue) -> MessageQueue:
        """A queue with the topic's name on brokers."""
        return queue._replace(topic=self.on_wire(queue.topic))

    def ask(
        self,
        address: str,
        command: Command,
        deadline: Deadline | None = None,
        accept: Container[int] = (Response.SUCCESS,),
    ) -> Command:
        """Return the answer if its code is in ``accept``; otherwise raise the error for the code."""
        answer = self.exchange(address, command, deadline or Deadline.after(self.request_timeout_s))
        if answer.code not in accept:
            raise error_from_response(answer, address)
        return answer

    def exchange(self, address: str, command: Command, deadline: Deadline) -> Command:
        """Return the answer, with any code."""
        try:
            command = self._signed(command)
            connection = self.pool.get(address, deadline)
        except RocketMQError as e:
            e.unsent = True
            raise
        answer = connection.call(command, deadline)
        self._noted(answer, address, connection)
        return answer

    def ask_async(self, address: str, command: Command, deadline: Deadline, done: Done) -> None:
        """Call ``done`` once with the answer (any code) or the error, on any thread. Connecting may block."""
        self._ask_each(address, [(command, done)], deadline)

    def exchange_each(self, asked: Sequence[tuple[str, Command]], deadline: Deadline) -> list[Command | RocketMQError]:
        """Send all requests at once. Returns answers (any code) and errors, in order."""
        answers = _PendingAnswers(asked, self.pool.dialling.arriving)
        try:
            self._spread(answers, range(len(asked)), deadline)
            answers.wait()
            return [answer for answer in answers.outcomes if answer is not None]
        finally:
            answers.release()

    def exchange_soon(
        self, asked: Sequence[tuple[str, Command]], deadline: Deadline, grace_s: float
    ) -> list[Command | RocketMQError | None]:
        """The same, but stop waiting for addresses that do not answer within ``grace_s`` after the last answer of the others.

        The result has None for such an address. Later calls send it no request and have None, too, until it has answered
        or ``deadline`` has passed. A later call with the same request gets the late answer if its own is late again.
        """
        answers = _PendingAnswers(asked, self.pool.dialling.arriving, deadline)
        of_address: dict[str, list[int]] = {}
        for i, (address, _) in enumerate(asked):
            of_address.setdefault(address, []).append(i)
        fresh: list[int] = []
        before: dict[int, Command | RocketMQError] = {}
        for address, mine in of_address.items():
            if self._owes(address):
                answers.skip(len(mine))
            else:
                before |= self._from_before(answers, mine, address)
                fresh += mine
        for address, late in list(self.late.items()):
            if late.deadline.expired and address not in of_address:  # it may have left the routes
                self._forget_late(address, late)
        outcomes: list[Command | RocketMQError | None] = []
        late_ones: set[str] = set()
        try:
            self._spread(answers, fresh, deadline)
            answers.wait(grace_s, len(fresh))
            outcomes += answers.outcomes
            late_ones |= {asked[i][0] for i in fresh if outcomes[i] is None}
        finally:
            answers.release(but=late_ones)
        self.late.update(dict.fromkeys(late_ones, answers))
        return [before.get(i) if each is None else each for i, each in enumerate(outcomes)]

    def _owes(self, address: str) -> bool:
        """Whether an address has not answered an earlier request."""
        before = self.late.get(address)
        return before is not None and any(
            one is None for (a, _), one in zip(before.asked, before.outcomes, strict=True) if a == address
        )

    def _from_before(
        self, answers: _PendingAnswers, mine: Sequence[int], address: str
    ) -> dict[int, Command | RocketMQError]:
        """Late answers of an address to earlier requests that are equal to these."""
        before = self.late.get(address)
        if before is None:
            return {}
        known = [
            (command, one) for (a, command), one in zip(before.asked, before.outcomes, strict=True) if a == address
        ]
        self._forget_late(address, before)
        if [_request_content(command) for command, _ in known] != [_request_content(answers.asked[i][1]) for i in mine]:
            return {}
        return {i: one for i, (_, one) in zip(mine, known, strict=True) if one is not None}

    def _forget_late(self, address: str, answers: _PendingAnswers) -> None:
        if self.late.pop(address, None) is answers:
            answers.release(but=[a for a, others in list(self.late.items()) if others is answers])

    def _spread(self, answers: _PendingAnswers, chosen: Iterable[int], deadline: Deadline) -> None:
        """Send to every address. Up to a few dozen addresses without a connection are connected to in parallel."""
        of_address: dict[str, list[tuple[Command, Done]]] = {}
        for i in chosen:
            address, command = answers.asked[i]
            of_address.setdefault(address, []).append((command, functools.partial(answers.tell, i)))
        dialled = deque[functools.partial[None]]()
        for address, calls in of_address.items():
            if len(of_address) == 1 or self.pool.live(address):
                self._ask_each(address, calls, deadline)
            else:
                dialled.append(functools.partial(self._ask_each, address, calls, deadline))

        def dial() -> None:
            while True:
                try:
                    ask = dialled.popleft()
                except IndexError:
                    return
                ask()

        for _ in range(min(_MAX_PARALLEL_CONNECTS, len(dialled))):
            try:
                start_thread("rocketmq-dial", dial, again=False)
            except RuntimeError:  # no more threads: connect one after the other
                dial()

    def _ask_each(self, address: str, calls: Sequence[tuple[Command, Done]], deadline: Deadline) -> None:
        try:
            signed = [self._signed(command) for command, _ in calls]
            connection = self.pool.get(address, deadline, patient=False)
        except RocketMQError as e:
            e.unsent = True
            for _, done in calls:
                done(e)
            return

        def noted(done: Done, answer: Command | RocketMQError) -> None:
            if not isinstance(answer, RocketMQError):
                self._noted(answer, address, connection)
            done(answer)

        dones = (functools.partial(noted, done) for _, done in calls)
        connection.call_each(list(zip(signed, dones, strict=True)), deadline)

    def tell(self, address: str, command: Command, deadline: Deadline | None = None) -> None:
        """Send a one-way request."""
        deadline = deadline or Deadline.after(self.request_timeout_s)
        command = self._signed(command)
        self.pool.get(address, deadline).send_oneway(command, deadline)

    def _signed(self, command: Command) -> Command:
        return self.credentials.sign(command) if self.credentials else command

    def _noted(self, answer: Command, address: str, connection: Connection) -> None:
        """Drop the connection of a server that is shutting down: it rejects every request on it, but not on a new one."""
        if answer.code == Response.GO_AWAY:
            self.pool.retire(address, connection)


def _request_content(command: Command) -> tuple[int, dict[str, str], bytes]:
    """The content of a request without its number, to compare requests."""
    return command.code, command.ext, bytes(command.body)


def error_from_response(
    answer: Command, address: str, topic: str | None = None, queue: str | None = None
) -> RocketMQError:
    """The error for an unsuccessful answer."""
    kind = error_for(answer.code, answer.remark or "")
    if answer.code == Response.REQUEST_CODE_NOT_SUPPORTED and answer.peer in _NOT_SUPPORTED:
        message, remedy = _NOT_SUPPORTED[answer.peer]
        return NotSupported(message, address, answer.code, topic, queue, (answer.remark or "").strip() or None, remedy)
    if issubclass(kind, ServerFault):
        words = answer.remark or ""
        kind = next((passing for begin, passing in _TRANSIENT_FAULTS.items() if words.startswith(begin)), kind)
    forbidden = answer.ext.get("forbiddenType")
    told = forbidden in map(str, UNREADABLE) if forbidden is not None else PULLS_FORBIDDEN in (answer.remark or "")
    if answer.code == Response.NO_PERMISSION and told:
        kind = NotReadable
    denied = issubclass(kind, AccessDenied) and forbidden is None
    # Servers append a pointer to their documentation on further lines.
    remark = (answer.remark or "").split("\n", 1)[0].strip() or None
    message = "access denied" if denied else "the server refused the request"
    return kind(message, address, answer.code, topic, queue, remark, _DENIED if denied else None)
