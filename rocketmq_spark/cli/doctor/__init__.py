"""``rocketmq-spark doctor``: what is checked (pure, over what was found), who asks, and the command."""
