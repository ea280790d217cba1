"""The slot pool: choosing experts, finding their slots, fetching what is missing."""
