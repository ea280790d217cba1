"""How weights are stored: one file for each format."""
