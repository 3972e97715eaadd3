"""Who signs requests: keys that are given, or that come from a file or function and are asked for again now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rocketmq_spark.base.threads import Failure, attempt
from rocketmq_spark.errors import LocalProtocolError, OptionError, RocketMQError
from rocketmq_spark.options import Options
from rocketmq_spark.options.callables import resolve
from rocketmq_spark.wire import header
from rocketmq_spark.wire.header import Command

logger = logging.getLogger(__name__)


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
            return header.sign(command, self.access_key, self.secret_key, self.security_token)
        except UnicodeEncodeError as e:
            raise LocalProtocolError(f"request {command.code} cannot be signed: {e}") from e


# After a fetch that failed, while the keys of before are there.
AGAIN_S = 5.0


class RotatingCredentials:
    """Credentials that are fetched again when they are a minute old: they may be temporary. The old ones stay in use while
    new ones cannot be read, as when a file is being written: servers reject keys that are no longer valid.
    """

    def __init__(self, fetch: Callable[[], Credentials], max_age_s: float = 60.0) -> None:
        self._fetch = fetch
        self._max_age_s = max_age_s
        self._known: tuple[float, Credentials] | None = None  # with when they are to be fetched again

    def current(self) -> Credentials:
        known = self._known
        if known is None:
            known = self._known = time.monotonic() + self._max_age_s, self._fetched()
        elif time.monotonic() > known[0]:
            known = self._known = self._renewed(known[1])
        return known[1]

    def _renewed(self, before: Credentials) -> tuple[float, Credentials]:
        try:
            return time.monotonic() + self._max_age_s, self._fetched()
        except RocketMQError as e:
            logger.warning("the previous keys stay in use: %s", e)
            return time.monotonic() + AGAIN_S, before

    def _fetched(self) -> Credentials:
        found = attempt(self._fetch)  # a user's code; callers get errors of ours only
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
    """What a user's function gave: a tuple of access key, secret key and perhaps a token, or a mapping of them by name."""
    if isinstance(found, Mapping):
        found = (found.get("accessKey"), found.get("secretKey"), found.get("securityToken"))
    parts = tuple(found) if isinstance(found, Sequence) and not isinstance(found, str) else ()
    access, secret, token = (*parts, None, None, None)[:3]
    if not isinstance(access, str) or not isinstance(secret, str) or not isinstance(token, str | None):
        raise OptionError(
            "the function of option 'credentialsProvider' gave no credentials; "
            "expected (access key, secret key) or (access key, secret key, token)"
        )
    return Credentials(access, secret, token)


def from_file(path: Path) -> Credentials:
    """Lines ``accessKey=…``, ``secretKey=…`` and perhaps ``securityToken=…``."""
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except OSError as e:
        raise OptionError(f"option 'credentialsFile' is {str(path)!r}; it cannot be read: {e.strerror}") from e
    found = dict(line.partition("=")[::2] for line in lines if line and not line.startswith("#"))
    values = {name.strip(): value.strip() for name, value in found.items()}
    access, secret = values.get("accessKey"), values.get("secretKey")
    if not access or not secret:
        raise OptionError(f"option 'credentialsFile' is {str(path)!r}; expected lines accessKey=… and secretKey=…")
    return Credentials(access, secret, values.get("securityToken"))


def credentials_of(options: Options) -> Credentials | RotatingCredentials | None:
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
