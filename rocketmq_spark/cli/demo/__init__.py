"""``rocketmq-spark demo``: one file for each thing that it does; ``play`` is the command and puts them together."""
