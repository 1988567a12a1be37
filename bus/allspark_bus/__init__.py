"""What the processes share: ZeroMQ sockets, the Redis ledger, streams and catalogue, settings, errors."""
