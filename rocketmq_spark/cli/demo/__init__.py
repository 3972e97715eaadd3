"""``rocketmq-spark demo``: one file for each thing that it does; ``command`` puts them together."""
