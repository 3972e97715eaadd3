from tests.consumer.fake_member import consumer, fake, hand
from tests.consumer.group import group

__all__ = ["consumer", "fake", "group", "hand"]
