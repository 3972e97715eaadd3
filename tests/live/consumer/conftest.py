from tests.live.consumer.members import members

__all__ = ["members"]
