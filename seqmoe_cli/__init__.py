"""seqmoe: chat with Mixture-of-Experts models whose experts live in host RAM."""

__version__ = "0.1.0"
