"""What every command writes with: consoles, progress, tables, sizes."""
