"""Options to what every connection needs, whatever the transport: how names stand on the wire, and who signs."""

from __future__ import annotations

from pathlib import Path

from rocketmq_spark.client.credentials import Credentials, RotatingCredentials, from_file, from_provider
from rocketmq_spark.options import Options
from rocketmq_spark.options.callables import resolve
from rocketmq_spark.queues.environment import suffix_of
from rocketmq_spark.wire.names import Scope


def scope(options: Options) -> Scope:
    """How names stand on the wire: what lies outside a namespace, or an environment with topics of its own, is not seen."""
    return Scope(options.namespace or "", suffix_of(options))


def credentials(options: Options) -> Credentials | RotatingCredentials | None:
    """Keys from the options, or from a file or function that is asked again now and then."""
    if options.credentials_provider is not None:
        provider = resolve(options.credentials_provider, "credentialsProvider")
        return RotatingCredentials(lambda: from_provider(provider()))
    if options.credentials_file is not None:
        path = Path(options.credentials_file).expanduser()
        return RotatingCredentials(lambda: from_file(path))
    if options.access_key is None or options.secret_key is None:
        return None
    token = options.security_token
    return Credentials(options.access_key, options.secret_key.reveal(), token.reveal() if token else None)
