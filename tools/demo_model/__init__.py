"""Makes the demo model out of SmolLM2-135M-Instruct. Not part of the product; see README.md."""
