"""What every command writes with: consoles, progress, tables, figures. Knows no model."""
