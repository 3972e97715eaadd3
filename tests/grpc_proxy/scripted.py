"""A server that speaks gRPC and answers as it is told: for what a real Proxy does seldom, or not at will."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from typing import Any

import grpc

from rocketmq_spark.grpc_proxy.protos import proto
from rocketmq_spark.grpc_proxy.proxy import Proxy, ProxyConnectOptions
from rocketmq_spark.grpc_proxy.tables import RPCS, SERVICE, Code, MessageType, Permission

THREADS = 8  # that answer
Answer = Callable[[Any, grpc.ServicerContext], Any]


@contextlib.contextmanager
def serving(
    answers: Mapping[str, Answer], credentials: grpc.ServerCredentials | None = None, address: str = "127.0.0.1:0"
) -> Iterator[str]:
    """An address where these calls, by name, are answered; those that stream give iterators. Others are UNIMPLEMENTED."""
    server = grpc.server(futures.ThreadPoolExecutor(THREADS))
    handlers = {}
    for rpc in RPCS:
        if rpc.name in answers:
            kind = f"{'stream' if rpc.client_streaming else 'unary'}_{'stream' if rpc.server_streaming else 'unary'}"
            handlers[rpc.name] = getattr(grpc, f"{kind}_rpc_method_handler")(
                answers[rpc.name], proto(rpc.request).FromString, proto(rpc.response).SerializeToString
            )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    host = address.rpartition(":")[0]
    port = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    server.start()
    try:
        yield f"{host}:{port}"
    finally:
        server.stop(0).wait()


@contextlib.contextmanager
def serving_bytes(name: str, answer: bytes) -> Iterator[str]:
    """An address where calls of one kind are answered with these bytes, once or as a stream's only answer."""
    (rpc,) = (rpc for rpc in RPCS if rpc.name == name)

    def whatever(request: Any, context: grpc.ServicerContext) -> Any:
        return iter([answer]) if rpc.server_streaming else answer

    server = grpc.server(futures.ThreadPoolExecutor(THREADS))
    kind = f"unary_{'stream' if rpc.server_streaming else 'unary'}_rpc_method_handler"
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {name: getattr(grpc, kind)(whatever)}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def status(code: int, message: str = "") -> Any:
    return proto("Status")(code=code, message=message)


def route(*types: MessageType, permission: int = Permission.READ_WRITE) -> Answer:
    """A route of one queue that takes these types of messages."""

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        made = proto("QueryRouteResponse")(status=status(Code.OK))
        made.message_queues.add(topic=request.topic, permission=permission, accept_message_types=types)
        return made

    return answer


def acknowledge(request: Any, context: grpc.ServicerContext) -> Any:
    """One entry for all messages, as the Proxy answers."""
    made = proto("SendMessageResponse")(status=status(Code.OK))
    ids = ",".join(message.system_properties.message_id for message in request.messages)
    made.entries.add(status=status(Code.OK), message_id=ids, offset=7)
    return made


def client(*addresses: str, **access: Any) -> Proxy:
    return Proxy(ProxyConnectOptions(addresses, **{"name_on_wire": str, "keys": lambda: None, **access}))
