"""RocketMQ's Remoting protocol over TCP: connections and numbered requests. Topics and groups belong to ``client/``."""
