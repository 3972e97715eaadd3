"""A Proxy that means no good: each answer is right, or broken in one of many ways."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc

from rocketmq_spark.grpc_proxy.protos import proto, set_seconds
from rocketmq_spark.grpc_proxy.tables import RPCS, SERVICE, Code, MessageType, Permission, Rpc
from tests.fuzz.mutate import mutate

_CODES = [*map(int, Code), 0, -1, 1, 2**31 - 1]
_STATES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
_HANG_S = 5.0
_THREADS = 16


class HostileProxy:
    """``faults`` of a hundred answers are broken, as a seed and the order of the questions say."""

    def __init__(self, seed: int, faults: int) -> None:
        self._rng = random.Random(seed)
        self.faults = faults
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.address = ""

    @contextlib.contextmanager
    def serving(self) -> Iterator[HostileProxy]:
        server = grpc.server(futures.ThreadPoolExecutor(_THREADS))
        handlers = {}
        for rpc in RPCS:
            kind = f"{'stream' if rpc.client_streaming else 'unary'}_{'stream' if rpc.server_streaming else 'unary'}"
            handlers[rpc.name] = getattr(grpc, f"{kind}_rpc_method_handler")(self._handler(rpc))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield self
        finally:
            self._over.set()
            server.stop(0).wait()

    def _handler(self, rpc: Rpc) -> Callable[[Any, grpc.ServicerContext], Any]:
        def one(request: bytes, context: grpc.ServicerContext) -> bytes:
            return next(iter(self._answers(rpc, request, context)), b"")

        def many(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            yield from self._answers(rpc, request, context)

        def asked(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            for request in requests:
                yield from self._answers(rpc, request, context)

        return asked if rpc.client_streaming else many if rpc.server_streaming else one

    def _answers(self, rpc: Rpc, request: bytes, context: grpc.ServicerContext) -> list[bytes]:
        good = self._good(rpc, proto(rpc.request).FromString(request))
        with self._lock:
            broken = self._rng.randrange(100) < self.faults
            kind, code = self._rng.randrange(8) if broken else -1, self._rng.choice(_CODES)
            state = self._rng.choice(_STATES)
            samples = [one.SerializeToString() for one in good]
            if kind in (0, 1, 2):
                samples = [mutate(self._rng, [each]) for each in samples]
        if kind == 3:
            for one in good:
                one.status.code = code
            samples = [one.SerializeToString() for one in good]
        elif kind == 4:
            context.abort(state, "x" * 5000)
        elif kind == 5:
            self._over.wait(_HANG_S)
        elif kind == 6:
            samples = samples * 2
        elif kind == 7:
            samples = []
        return samples

    def _good(self, rpc: Rpc, request: Any) -> list[Any]:
        made: dict[str, Callable[[Any], list[Any]]] = {
            "QueryRoute": self._route,
            "QueryAssignment": self._assignment,
            "SendMessage": _sent,
            "ReceiveMessage": _received,
            "AckMessage": _acknowledged,
            "Telemetry": _settings,
        }
        return made[rpc.name](request) if rpc.name in made else [_fine(rpc.response)]

    def _queue(self, made: Any, topic: Any) -> None:
        made.topic.CopyFrom(topic)
        made.permission = Permission.READ_WRITE
        made.accept_message_types.extend(MessageType)
        made.broker.name = "broker-a"
        made.broker.endpoints.scheme = 1
        host, _, port = self.address.partition(":")
        made.broker.endpoints.addresses.add(host=host, port=int(port))

    def _route(self, request: Any) -> list[Any]:
        made = _fine("QueryRouteResponse")
        for number in range(2):
            self._queue(made.message_queues.add(id=number), request.topic)
        return [made]

    def _assignment(self, request: Any) -> list[Any]:
        made = _fine("QueryAssignmentResponse")
        self._queue(made.assignments.add().message_queue, request.topic)
        return [made]


def _fine(name: str) -> Any:
    made = proto(name)()
    made.status.code = Code.OK
    return made


def _sent(request: Any) -> list[Any]:
    made = _fine("SendMessageResponse")
    ids = ",".join(message.system_properties.message_id for message in request.messages)
    made.entries.add(status=proto("Status")(code=Code.OK), message_id=ids, offset=7, recall_handle="h")
    return [made]


def _received(request: Any) -> list[Any]:
    answers = [_fine("ReceiveMessageResponse")]
    for number in range(3):
        made = proto("ReceiveMessageResponse")()
        made.message.topic.CopyFrom(request.message_queue.topic)
        made.message.body = b"x"
        system = made.message.system_properties
        system.message_id, system.receipt_handle, system.delivery_attempt = f"{number}", f"r{number}", 1
        answers.append(made)
    return answers


def _acknowledged(request: Any) -> list[Any]:
    made = _fine("AckMessageResponse")
    for entry in request.entries:
        made.entries.add(
            message_id=entry.message_id,
            receipt_handle=entry.receipt_handle,
            status=proto("Status")(code=Code.OK),
        )
    return [made]


def _settings(request: Any) -> list[Any]:
    made = _fine("TelemetryCommand")
    made.settings.CopyFrom(request.settings)
    made.settings.backoff_policy.max_attempts = 3
    set_seconds(made.settings.backoff_policy.customized_backoff.next.add(), 1.0)
    set_seconds(made.settings.subscription.long_polling_timeout, 0.2)
    return [made]


def hostile_proxy(seed: int, faults: int) -> contextlib.AbstractContextManager[HostileProxy]:
    return HostileProxy(seed, faults).serving()
