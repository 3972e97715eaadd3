"""One request to one address: signing, deadline, and the broker's number turned into an error."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

from rocketmq_spark.clock import Deadline
from rocketmq_spark.codes import Response
from rocketmq_spark.errors import (
    AccessDenied,
    LocalProtocolError,
    OptionError,
    RocketMQError,
    ServerFault,
    ServiceNotAvailable,
    error_for,
)
from rocketmq_spark.remoting.connection import Connection, Done
from rocketmq_spark.remoting.pool import Pool
from rocketmq_spark.wire import acl, names
from rocketmq_spark.wire.header import Command

# A broker that takes no sends before a configured time says so with the code of its own exceptions.
_NOT_YET = "broker unable to service"
_DENIED = (
    "Access denied: check options 'accessKey' and 'secretKey' and the user's policies "
    "(source: Sub and Get on the topic, Sub on the group; sink: Pub on the topic)"
)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who signs the requests. Never shown."""

    access_key: str
    secret_key: str
    security_token: str | None = None

    def __repr__(self) -> str:
        return f"Credentials(access_key={self.access_key!r})"

    def current(self) -> Credentials:
        return self

    def sign(self, command: Command) -> Command:
        try:
            return acl.sign(command, self.access_key, self.secret_key, self.security_token)
        except UnicodeEncodeError as e:
            raise LocalProtocolError(f"request {command.code} cannot be signed: {e}") from e


class RotatingCredentials:
    """Credentials that are fetched again when they are a minute old: they may be temporary."""

    def __init__(self, fetch: Callable[[], Credentials], max_age_s: float = 60.0) -> None:
        self._fetch = fetch
        self._max_age_s = max_age_s
        self._known: tuple[float, Credentials] | None = None

    def current(self) -> Credentials:
        known = self._known
        if known is None or time.monotonic() - known[0] > self._max_age_s:
            known = self._known = (time.monotonic(), self._fetched())
        return known[1]

    def _fetched(self) -> Credentials:
        try:
            return self._fetch()
        except RocketMQError:
            raise
        except Exception as e:  # somebody else's code; callers are told errors of ours only
            raise OptionError(
                f"credentials cannot be had: {type(e).__name__}",
                remedy="Look at option 'credentialsProvider' or 'credentialsFile'",
            ) from e

    def sign(self, command: Command) -> Command:
        return self.current().sign(command)


@dataclass(frozen=True, slots=True)
class Calls:
    """Requests over a pool of connections."""

    pool: Pool
    request_timeout_s: float = 3.0
    credentials: Credentials | RotatingCredentials | None = None
    namespace: str = ""

    def on_wire(self, name: str) -> str:
        """A topic or group as brokers know it. Above this room names are always the user's."""
        return names.wrap_namespace(self.namespace, name)

    def ask(
        self,
        address: str,
        command: Command,
        deadline: Deadline | None = None,
        accept: Container[int] = (Response.SUCCESS,),
    ) -> Command:
        """The answer, when its code is in ``accept``; otherwise the error for the code."""
        answer = self.exchange(address, command, deadline or Deadline.after(self.request_timeout_s))
        if answer.code not in accept:
            raise refused(answer, address)
        return answer

    def exchange(self, address: str, command: Command, deadline: Deadline) -> Command:
        """The answer whatever its code."""
        command = self._signed(command)
        connection = self.pool.get(address, deadline)
        answer = connection.call(command, deadline)
        self._noted(answer, address, connection)
        return answer

    def ask_async(self, address: str, command: Command, deadline: Deadline, done: Done) -> None:
        """``done`` gets the answer whatever its code, or the error; once, on any thread. Connecting may block."""
        self._ask_each(address, [(command, done)], deadline)

    def exchange_each(self, asked: Sequence[tuple[str, Command]], deadline: Deadline) -> list[Command | RocketMQError]:
        """The answers of several addresses whatever their codes, or the errors, in order; all asked at once."""
        results: list[Any] = [None] * len(asked)
        left, counting, all_told = len(asked), threading.Lock(), threading.Event()

        def told(i: int, result: Command | RocketMQError) -> None:
            nonlocal left
            results[i] = result
            with counting:
                left -= 1
                if not left:
                    all_told.set()

        of_address: dict[str, list[tuple[Command, Done]]] = {}
        for i, (address, command) in enumerate(asked):
            of_address.setdefault(address, []).append((command, functools.partial(told, i)))
        for address, calls in of_address.items():
            self._ask_each(address, calls, deadline)
        if asked:
            all_told.wait()
        return results

    def _ask_each(self, address: str, calls: Sequence[tuple[Command, Done]], deadline: Deadline) -> None:
        try:
            signed = [self._signed(command) for command, _ in calls]
            connection = self.pool.get(address, deadline, patient=False)
        except RocketMQError as e:
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
        """A server that drains refuses everything on this connection, but not on a new one."""
        if answer.code == Response.GO_AWAY:
            self.pool.retire(address, connection)


def refused(answer: Command, address: str, topic: str | None = None, queue: str | None = None) -> RocketMQError:
    """The error for an answer that is not success."""
    kind = error_for(answer.code)
    if issubclass(kind, ServerFault) and (answer.remark or "").startswith(_NOT_YET):
        kind = ServiceNotAvailable
    denied = issubclass(kind, AccessDenied) and "forbiddenType" not in answer.ext
    # Servers append a pointer to their documentation on further lines.
    remark = (answer.remark or "").split("\n", 1)[0].strip() or None
    message = "access denied" if denied else "the server refused the request"
    return kind(message, address, answer.code, topic, queue, remark, _DENIED if denied else None)
