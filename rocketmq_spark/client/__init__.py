"""The verbs of brokers and name servers over remoting: knows topics, routes and groups, nothing of Spark."""
