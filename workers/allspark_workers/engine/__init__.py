"""The inference engine: scheduler, paged KV cache, sampling. No sockets, no protocol messages."""
