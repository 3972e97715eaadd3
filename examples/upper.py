"""Reads the topic ``orders``, writes its bodies in upper case to ``orders-upper``, and ends when it has caught up."""

from pyspark.sql import SparkSession

spark = SparkSession.builder.getOrCreate()
orders = (
    spark.readStream.format("rocketmq")
    .options(nameServer="127.0.0.1:9876", subscribe="orders", startingOffsets="earliest")
    .load()
)
query = (
    orders.selectExpr("upper(cast(body AS string)) AS body", "tags", "keys")
    .writeStream.format("rocketmq")
    .options(nameServer="127.0.0.1:9876", topic="orders-upper", checkpointLocation="/tmp/orders-upper")
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
