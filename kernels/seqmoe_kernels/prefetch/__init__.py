"""Experts copied before they are wanted."""
