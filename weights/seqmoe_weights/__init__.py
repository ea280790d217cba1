"""Checkpoints and packed models: reading, conversion, records, the host store. Knows no CUDA code.

Submodules are imported where they are used; this file imports nothing, so that `--help` stays fast.
"""
