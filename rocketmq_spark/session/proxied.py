"""Options to what speaks gRPC with a Proxy, cached per process: the part of ``session`` for ``transport=grpc``.

gRPC is imported when the first client is made, in the process that uses it, so that only users of gRPC need it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rocketmq_spark.base import extras, process
from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.client.calls import credentials_of
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import SendRequest
from rocketmq_spark.options import Options
from rocketmq_spark.queues.environment import scope_of
from rocketmq_spark.wire.compression import decompress
from rocketmq_spark.wire.messages import BatchItem, decode_batch
from rocketmq_spark.wire.properties import decode_properties

if TYPE_CHECKING:
    from rocketmq_spark.grpc_proxy.member import ProxyMember
    from rocketmq_spark.grpc_proxy.outgoing import ProxySendRequest, RequestEncoder, RequestMessage
    from rocketmq_spark.grpc_proxy.proxy import Proxy
    from rocketmq_spark.grpc_proxy.sender import ProxySender


_PROXIES, _SENDERS = "proxies", "proxy senders"
_STARTS = {b"\x04\x22\x4d\x18": SysFlag.LZ4, b"\x28\xb5\x2f\xfd": SysFlag.ZSTD}


def _proxy(options: Options) -> Proxy:
    """A new one."""
    try:
        from rocketmq_spark.grpc_proxy.channel import Keys, Tls
        from rocketmq_spark.grpc_proxy.proxy import Access, Proxy
    except ModuleNotFoundError as e:
        raise OptionError(
            f"option 'transport' is 'grpc', which needs grpcio and protobuf here: {e}",
            remedy=extras.command(extras.GRPC),
        ) from e

    signer = credentials_of(options)

    def keys() -> Keys | None:
        now = None if signer is None else signer.current()
        return None if now is None else Keys(now.access_key, now.secret_key, now.security_token)

    tls = Tls(options.tls_ca_file, options.tls_cert_file, options.tls_key_file, options.tls_server_name)
    access = Access(
        options.proxy_endpoint,
        scope_of(options).on_wire,
        keys,
        tls if options.tls else None,
        options.connect_timeout,
        options.request_timeout,
    )
    return Proxy(access)


def _key(options: Options) -> object:
    return (
        options.proxy_endpoint,
        (options.access_key, options.secret_key, options.security_token),
        (options.credentials_file, options.credentials_provider, scope_of(options)),
        (options.tls, options.tls_ca_file, options.tls_cert_file, options.tls_key_file, options.tls_server_name),
        options.connect_timeout,
        options.request_timeout,
    )


def sender(options: Options) -> ProxySender:
    """The one of these connection options in this process."""
    key = _key(options)
    proxy = process.once(_PROXIES, key, lambda: _proxy(options))
    from rocketmq_spark.grpc_proxy.sender import ProxySender

    return process.once(_SENDERS, key, lambda: ProxySender(proxy, take_apart, by_columns, unpack))


def pop_member(options: Options) -> ProxyMember:
    """A new one: a Proxy knows one consumer by each client id."""
    proxy = _proxy(options)
    from rocketmq_spark.grpc_proxy.member import ProxyMember

    return ProxyMember(proxy, options.group, unpack, options.ordered)


def unpack(body: bytes) -> bytes:
    """A body that some producer compressed, by its first bytes: the Proxy does not tell by what."""
    kind = next((kind for start, kind in _STARTS.items() if body.startswith(start)), SysFlag.ZLIB)
    return decompress(body, int(SysFlag.COMPRESSED | kind))


def take_apart(request: SendRequest) -> list[RequestMessage]:
    """The messages of a request as producers encode it; what is compressed is opened, for gRPC's readers need not know how."""
    from rocketmq_spark.grpc_proxy.outgoing import RequestMessage

    if request.batch:
        items = decode_batch(request.body)
    else:
        body = decompress(request.body, request.sys_flag) if request.sys_flag & SysFlag.COMPRESSED else request.body
        items = [BatchItem(body, request.properties, request.flag)]
    return [RequestMessage(item.body, decode_properties(item.properties), item.flag) for item in items]


def by_columns(request: SendRequest, encode: RequestEncoder) -> ProxySendRequest | None:
    """A batch as one request, where Arrow is loaded anyway, as in Spark's tasks: who sends a few messages need not have it."""
    if not request.batch or "pyarrow" not in sys.modules:
        return None
    from rocketmq_spark.columnar.encode import proxy_request

    return proxy_request.by_columns(request.body, encode)


def close(kept: dict[str, dict[Any, Any]]) -> None:
    """End the channels among what a process kept."""
    for proxy in kept.get(_PROXIES, {}).values():
        proxy.close()
