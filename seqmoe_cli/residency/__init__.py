"""Which experts are in the pool, and how they get there. Knows no model and no terminal."""
