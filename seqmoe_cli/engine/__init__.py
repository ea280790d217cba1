"""Token ids in, steps out: forward passes, KV state, sampling, the memory plan."""
