"""The real client of ``tests/client``."""

from tests.client.conftest import real

__all__ = ["real"]
