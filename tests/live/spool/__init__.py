"""The spool on real brokers that are killed and come back."""
