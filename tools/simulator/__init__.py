"""What a pool would have done: replay of recorded traces on the CPU, without a model."""
