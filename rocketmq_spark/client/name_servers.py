"""The list of name servers. Requests go to the current server; if it does not answer, they go to the next server."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import AUTO_CREATE_TOPIC, Response
from rocketmq_spark.client.rpc import RpcClient, error_from_response
from rocketmq_spark.errors import (
    CallTimeout,
    ConnectionLost,
    NotSupported,
    OptionError,
    RemoteProtocolError,
    RocketMQError,
    ServerFault,
    TopicNotFound,
)
from rocketmq_spark.options.names import kafka_port_remedy
from rocketmq_spark.wire import rpc
from rocketmq_spark.wire.header import Command

_NAME_SERVER_REMEDY = "Check option 'nameServer' and that the name server runs"
_TIMEOUT_REMEDY = "Allow more time, or check that the name server runs and has this address"


class NameServers:
    """The list of name servers. Requests go to the current server. If the current server does not answer, the next server becomes
    the current server.
    """

    def __init__(self, rpc_client: RpcClient, addresses: Sequence[str], rng: random.Random | None = None) -> None:
        self.addresses = tuple(address.strip() for address in addresses if address.strip())
        if not self.addresses:
            raise OptionError("no name server is given", remedy="Set option 'nameServer' to host:port")
        self.rpc_client = rpc_client
        rpc_client.pool.note_name_servers(self.addresses)
        self._current_index = (rng or random.Random()).randrange(len(self.addresses))

    def request(self, make_command: Callable[[], Command], deadline: Deadline | None = None) -> Command:
        return self.request_with_address(make_command, deadline)[1]

    def request_with_address(
        self, make_command: Callable[[], Command], deadline: Deadline | None = None
    ) -> tuple[str, Command]:
        """Send the request to one server after the other. Returns the address and the answer of the first server that answers.

        Each server gets the request timeout, but no more than its share of the remaining time. Name servers do not replicate, so
        a topic that one server does not know may be known to another server. If no server answers, raises the last error, with
        all addresses. Raises ``OptionError`` if all addresses are brokers.
        """
        first_index = self._current_index
        topic_not_found_error: TopicNotFound | None = None
        last_error: RocketMQError | None = None
        silent_servers: list[str] = []
        broker_address_error: OptionError | None = None
        for i in range(len(self.addresses)):
            index = (first_index + i) % len(self.addresses)
            try:
                answer = self._request_with_retry(
                    self.addresses[index], make_command, self._server_deadline(deadline, len(self.addresses) - i)
                )
            except TopicNotFound as e:
                topic_not_found_error = topic_not_found_error or e
            except (ConnectionLost, CallTimeout, RemoteProtocolError) as e:
                last_error = e
                silent_servers.append(self.addresses[index])
            except NotSupported:
                if self.rpc_client.pool.is_proxy(self.addresses[index]):
                    raise
                if self.serves_routes(self.addresses[index], deadline):
                    # ``serves_routes`` has shown that the server is a Proxy. So the error of the repeated request names the
                    # Proxy.
                    return self.addresses[index], self.rpc_client.request(
                        self.addresses[index], make_command(), self._server_deadline(deadline)
                    )
                broker_address_error = _error_for_broker_address(self.addresses[index])
            else:
                self._current_index = index
                return self.addresses[index], answer
        if topic_not_found_error is not None:
            topic_not_found_error.silent_name_servers = silent_servers
            raise topic_not_found_error
        if last_error is None:
            assert broker_address_error is not None
            raise broker_address_error
        if deadline is not None and deadline.expired and isinstance(last_error, CallTimeout):
            remedy = kafka_port_remedy(self.addresses) or _TIMEOUT_REMEDY
            raise CallTimeout(
                "no name server answered in time", ";".join(self.addresses), remedy=remedy
            ) from last_error
        raise type(last_error)(
            f"no name server answers: {last_error.message}",
            ";".join(self.addresses),
            remedy=kafka_port_remedy(self.addresses) or last_error.remedy or _NAME_SERVER_REMEDY,
        ) from last_error

    def _request_with_retry(
        self, address: str, make_command: Callable[[], Command], deadline: Deadline | None
    ) -> Command:
        """Send a request, and send it once more after a fault. A name server fails with ConcurrentModificationException if a
        route changes while the name server encodes the route.
        """
        try:
            return self.rpc_client.request(address, make_command(), deadline)
        except ServerFault:
            return self.rpc_client.request(address, make_command(), deadline)

    def serves_routes(self, address: str, deadline: Deadline | None = None) -> bool:
        """Whether the server answers requests for routes. Name servers and Proxies answer such requests; brokers do not."""
        try:
            self.rpc_client.request(address, route_request(AUTO_CREATE_TOPIC), self._server_deadline(deadline))
        except NotSupported:
            return False
        except RocketMQError:
            pass
        return True

    def request_many(
        self, commands: Sequence[Command], deadline: Deadline | None = None
    ) -> tuple[str, list[Command | None]]:
        """Send several requests at once to the current server. Returns the address of this server and the answers.

        An answer is None if the request failed; callers then use ``request``, which tries the other servers.
        """
        deadline = deadline or Deadline.after(self.rpc_client.request_timeout_s)
        server = self.addresses[self._current_index]
        answers = self.rpc_client.invoke_each([(server, command) for command in commands], deadline)
        return server, [
            answer if not isinstance(answer, RocketMQError) and answer.code == Response.SUCCESS else None
            for answer in answers
        ]

    def request_all_servers(self, make_command: Callable[[], Command], deadline: Deadline | None = None) -> None:
        """Send the request to all servers at once, because name servers do not replicate. Raises the first error at the end."""
        server_deadline = self._server_deadline(deadline) or Deadline.after(self.rpc_client.request_timeout_s)
        answers = self.rpc_client.invoke_each(
            [(address, make_command()) for address in self.addresses], server_deadline
        )
        for address, answer in zip(self.addresses, answers, strict=True):
            if isinstance(answer, RocketMQError):
                raise answer
            if answer.code != Response.SUCCESS:
                raise error_from_response(answer, address)

    def _server_deadline(self, deadline: Deadline | None, server_count: int = 1) -> Deadline | None:
        """The deadline of the next request, if ``server_count`` servers share the remaining time."""
        if deadline is None:
            return None
        return deadline.within(min(self.rpc_client.request_timeout_s, deadline.remaining() / server_count))


def route_request(topic_on_wire: str) -> Command:
    return rpc.GET_ROUTEINFO_BY_TOPIC.request(topic=topic_on_wire, acceptStandardJsonOnly=True)


def _error_for_broker_address(address: str) -> OptionError:
    return OptionError(
        f"option 'nameServer' names {address}, which is not a name server: it answers as a broker and has no routes",
        remedy="Give host and port of the name server, 9876 unless it was changed",
    )
