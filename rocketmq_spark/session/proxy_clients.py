"""Creates gRPC clients of a Proxy for given options and caches them per process: the part of ``session`` for ``transport=grpc``.

gRPC is imported when the first client is created, in the process that uses it, so only users of gRPC need the package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rocketmq_spark.base import extras, process
from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.client.credentials import credentials_of
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import SendRequest
from rocketmq_spark.model.send import SentMessage
from rocketmq_spark.options import Options
from rocketmq_spark.producer import outgoing
from rocketmq_spark.queues.environment import scope_of
from rocketmq_spark.remoting.protocol import max_pushed_frame_bytes
from rocketmq_spark.wire.compression import decompress
from rocketmq_spark.wire.properties import decode_properties

if TYPE_CHECKING:
    from rocketmq_spark.columnar.encode.encoder import Encoder
    from rocketmq_spark.grpc_proxy.member import ProxyMember
    from rocketmq_spark.grpc_proxy.proxy import Proxy
    from rocketmq_spark.grpc_proxy.sender import ProxySender


# Kinds of entries in ``base.process``.
_PROXIES, _SENDERS = "proxies", "proxy senders"
_CODECS_BY_MAGIC = {b"\x04\x22\x4d\x18": SysFlag.LZ4, b"\x28\xb5\x2f\xfd": SysFlag.ZSTD}


def _create_proxy(options: Options) -> Proxy:
    """Create the connection to the endpoints in ``options``."""
    try:
        from rocketmq_spark.grpc_proxy.channel import SigningKeys, Tls
        from rocketmq_spark.grpc_proxy.proxy import Proxy, ProxyConnectOptions
    except ModuleNotFoundError as e:
        raise OptionError(
            f"option 'transport' is 'grpc', which needs grpcio and protobuf here: {e}",
            remedy=extras.install_command(extras.GRPC),
        ) from e

    provider = credentials_of(options)

    def keys() -> SigningKeys | None:
        credentials = None if provider is None else provider.current()
        return (
            None
            if credentials is None
            else SigningKeys(credentials.access_key, credentials.secret_key, credentials.security_token)
        )

    tls = Tls(options.tls_ca_file, options.tls_cert_file, options.tls_key_file, options.tls_server_name)
    connect_options = ProxyConnectOptions(
        options.proxy_endpoint,
        scope_of(options).name_on_wire,
        keys,
        tls if options.tls else None,
        options.connect_timeout,
        options.request_timeout,
        max_pushed_frame_bytes(options.max_message_size),
    )
    return Proxy(connect_options)


def connection_key(options: Options) -> object:
    return (
        options.proxy_endpoint,
        (options.access_key, options.secret_key, options.security_token),
        (options.credentials_file, options.credentials_provider, scope_of(options)),
        (options.tls, options.tls_ca_file, options.tls_cert_file, options.tls_key_file, options.tls_server_name),
        options.connect_timeout,
        options.request_timeout,
        max_pushed_frame_bytes(options.max_message_size),
    )


def sender(options: Options) -> ProxySender:
    """Return the sender for these connection options in this process."""
    key = connection_key(options)
    proxy = process.get_or_create(_PROXIES, key, lambda: _create_proxy(options))
    from rocketmq_spark.grpc_proxy.sender import ProxySender

    return process.get_or_create(_SENDERS, key, lambda: ProxySender(proxy, sent_messages, decompress_body))


def pop_member(options: Options) -> ProxyMember:
    """Create a member. Members are not shared, because a Proxy allows one consumer per client id."""
    proxy = _create_proxy(options)
    from rocketmq_spark.grpc_proxy.member import ProxyMember

    return ProxyMember(proxy, options.group, decompress_body, options.ordered)


def decompress_body(body: bytes) -> bytes:
    """Decompress a body. The codec is recognized by the first bytes, because the Proxy does not report the codec."""
    codec = next((codec for magic, codec in _CODECS_BY_MAGIC.items() if body.startswith(magic)), SysFlag.ZLIB)
    return decompress(body, int(SysFlag.COMPRESSED | codec))


def sent_messages(request: SendRequest) -> Sequence[SentMessage]:
    """Return the message of a send, or the messages of a batch from a spool. Compressed bodies in a spool are decompressed,
    because a gRPC consumer may lack the codec.
    """
    if request.batch:
        return outgoing.messages_in_batch(request)
    body = decompress(request.data, request.sys_flag) if request.sys_flag & SysFlag.COMPRESSED else request.data
    return [SentMessage(body, decode_properties(request.properties), request.flag)]


def row_encoder(options: Options) -> Callable[..., Encoder]:
    """Return the function that creates the sink's encoder of columns."""
    from rocketmq_spark.columnar.encode.proxy_rows import ProxyRowEncoder

    return functools.partial(ProxyRowEncoder, proxy=sender(options).encoder)


def close(entries: dict[str, dict[Any, Any]]) -> None:
    """Close the gRPC channels among the entries of a process."""
    for proxy in entries.get(_PROXIES, {}).values():
        proxy.close()
