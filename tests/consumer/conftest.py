from tests.consumer.group import group
from tests.consumer.pull_bench import consumer, fake, hand

__all__ = ["consumer", "fake", "group", "hand"]
