"""Choosing the victim of a miss."""
