"""The keys that sign requests: fixed, or read again regularly from a file or a user's function."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rocketmq_spark.base.folders import has_own_rights
from rocketmq_spark.base.threads import Failure, capture
from rocketmq_spark.errors import (
    LocalProtocolError,
    OptionError,
    RocketMQError,
)
from rocketmq_spark.options import Options, paths
from rocketmq_spark.options.names import resolve
from rocketmq_spark.wire import header
from rocketmq_spark.wire.header import Command

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
FETCH_RETRY_PAUSE_S = 5.0


class RotatingCredentials:
    """Credentials that are fetched again when they are a minute old, because they may be temporary.

    If a fetch fails, for example while the file is being written, the previous credentials stay in use. Previous credentials do
    no harm, because servers reject keys that are no longer valid.
    """

    def __init__(self, fetch: Callable[[], Credentials], max_age_s: float = 60.0) -> None:
        self._fetch = fetch
        self._max_age_s = max_age_s
        # The time of the next fetch, and the credentials.
        self._cached_credentials: tuple[float, Credentials] | None = None

    def current(self) -> Credentials:
        cached_credentials = self._cached_credentials
        if cached_credentials is None:
            cached_credentials = self._cached_credentials = time.monotonic() + self._max_age_s, self._fetch_checked()
        elif time.monotonic() > cached_credentials[0] and has_own_rights():
            cached_credentials = self._cached_credentials = self._fetch_again(cached_credentials[1])
        return cached_credentials[1]

    def _fetch_again(self, previous_credentials: Credentials) -> tuple[float, Credentials]:
        try:
            return time.monotonic() + self._max_age_s, self._fetch_checked()
        except RocketMQError as e:
            logger.warning("the previous keys stay in use: %s", e)
            return time.monotonic() + FETCH_RETRY_PAUSE_S, previous_credentials

    def _fetch_checked(self) -> Credentials:
        result = capture(self._fetch)  # the user's function may raise anything; callers expect RocketMQError
        if not isinstance(result, Failure):
            return result
        if isinstance(result.error, RocketMQError):
            raise result.error
        raise OptionError(
            f"the credentials cannot be fetched: {type(result.error).__name__}",
            remedy="Check option 'credentialsProvider' or 'credentialsFile'",
        ) from result.error

    def sign(self, command: Command) -> Command:
        return self.current().sign(command)


def from_provider(result: object) -> Credentials:
    """Convert the result of a user's function: (access key, secret key, optional token), or a mapping with these names."""
    if isinstance(result, Mapping):
        result = (result.get("accessKey"), result.get("secretKey"), result.get("securityToken"))
    parts = tuple(result) if isinstance(result, Sequence) and not isinstance(result, str) else ()
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
    pairs = dict(line.partition("=")[::2] for line in lines if line and not line.startswith("#"))
    values = {name.strip(): value.strip() for name, value in pairs.items()}
    access, secret = values.get("accessKey"), values.get("secretKey")
    if not access or not secret:
        raise OptionError(f"option 'credentialsFile' is {str(path)!r}; expected lines accessKey=… and secretKey=…")
    return Credentials(access, secret, values.get("securityToken"))


def credentials_of(options: Options) -> Credentials | RotatingCredentials | None:
    """Return the keys from the options, or from the file or function that an option names; None without keys."""
    if options.credentials_provider is not None:
        provider = resolve(options.credentials_provider, "credentialsProvider")
        return RotatingCredentials(lambda: from_provider(provider()))
    if options.credentials_file is not None:
        path = paths.expand_home(options.credentials_file, "credentialsFile")
        return RotatingCredentials(functools.partial(from_file, path))
    if options.access_key is None or options.secret_key is None:
        return None
    token = options.security_token
    return Credentials(options.access_key, options.secret_key.reveal(), token.reveal() if token else None)
