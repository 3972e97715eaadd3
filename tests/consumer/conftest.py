from tests.consumer.group import group

__all__ = ["group"]
