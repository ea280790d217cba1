"""Makes the sparse demo model: SmolLM2's feed-forward layers cut into routed experts and healed."""
