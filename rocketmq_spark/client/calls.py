"""One request to one address: signing, deadline, and the broker's number turned into an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rocketmq_spark.clock import Deadline
from rocketmq_spark.codes import Response
from rocketmq_spark.errors import AccessDenied, RocketMQError, error_for
from rocketmq_spark.remoting.pool import Pool
from rocketmq_spark.wire import acl
from rocketmq_spark.wire.header import Command

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

    def sign(self, command: Command) -> Command:
        return acl.sign(command, self.access_key, self.secret_key, self.security_token)


@dataclass(frozen=True, slots=True)
class Calls:
    """Requests over a pool of connections."""

    pool: Pool
    request_timeout_s: float = 3.0
    credentials: Credentials | None = None

    def ask(
        self,
        address: str,
        command: Command,
        deadline: Deadline | None = None,
        accept: Iterable[int] = (Response.SUCCESS,),
    ) -> Command:
        """The answer, when its code is in ``accept``; otherwise the error for the code."""
        deadline = deadline or Deadline.after(self.request_timeout_s)
        answer = self.pool.get(address, deadline).call(self._signed(command), deadline)
        if answer.code not in accept:
            raise refused(answer, address)
        return answer

    def ask_async(
        self, address: str, command: Command, deadline: Deadline, done: Callable[[Command | RocketMQError], None]
    ) -> None:
        """``done`` gets the answer whatever its code, or the error; once, on any thread. Connecting may block."""
        try:
            connection = self.pool.get(address, deadline)
        except RocketMQError as e:
            done(e)
            return
        connection.call_async(self._signed(command), deadline, done)

    def tell(self, address: str, command: Command, deadline: Deadline | None = None) -> None:
        """Send a one-way request."""
        deadline = deadline or Deadline.after(self.request_timeout_s)
        self.pool.get(address, deadline).send_oneway(self._signed(command), deadline)

    def _signed(self, command: Command) -> Command:
        return self.credentials.sign(command) if self.credentials else command


def refused(answer: Command, address: str, topic: str | None = None, queue: str | None = None) -> RocketMQError:
    """The error for an answer that is not success."""
    kind = error_for(answer.code)
    denied = issubclass(kind, AccessDenied) and "forbiddenType" not in answer.ext
    # Servers append a pointer to their documentation on further lines.
    remark = (answer.remark or "").split("\n", 1)[0].strip() or None
    message = "access denied" if denied else "the server refused the request"
    return kind(message, address, answer.code, topic, queue, remark, _DENIED if denied else None)
