"""Checkpoints and packed models: reading, conversion, records, the host store. Of the kernels it
knows the formats alone.

Submodules are imported where they are used; this file imports nothing, so that `--help` stays fast.
"""
