"""``PullConsumer``: messages are given to whoever polls, as Java's ``DefaultLitePullConsumer`` does."""
