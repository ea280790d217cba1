"""What a model folder and its user say in text: tokens, sampling settings, files. Knows no engine
and no terminal."""
