"""Dense layers of one token: norms and matrix-vector products."""
