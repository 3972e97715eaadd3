"""``rocketmq-spark doctor``: the checks (pure functions of answers), the requests to servers, and the command."""
