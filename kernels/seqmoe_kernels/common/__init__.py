"""What every kernel stands on: checks, the clock, launch options."""
