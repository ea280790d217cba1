"""The expert MLPs, computed out of slots."""
