"""``Consumer``: messages are pulled ahead and given to a listener, as Java's ``DefaultMQPushConsumer`` does."""
