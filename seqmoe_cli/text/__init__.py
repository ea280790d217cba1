"""Text and token ids. Knows no engine and no terminal."""
