"""The ports over the Remoting protocol: requests to brokers and name servers about topics, routes and groups."""
