"""Attention of one token over the KV state."""
