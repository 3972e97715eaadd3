"""Task writers are for the sink's tests here, too."""

from tests.live.writes import writes

__all__ = ["writes"]
