"""The real client of ``tests/client``."""

from tests.client.conftest import broker, parts, real

__all__ = ["broker", "parts", "real"]
