"""``PullConsumer``: messages are returned by ``poll``, as Java's ``DefaultLitePullConsumer`` does."""
