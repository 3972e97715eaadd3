"""Administration of a cluster: what ``rocketmq_spark.Admin`` and the commands ask and change, each fact in one place."""
