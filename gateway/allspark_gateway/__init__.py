"""The gateway: gRPC sockets, and views on what is in Redis."""
