"""What is known of coming routing: traces of what models chose. Knows no engine and no terminal."""
