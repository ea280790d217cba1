"""What `seqmoe bench` and `seqmoe perplexity` do, apart from the command line.

`matrix` says what is run, `measure` runs it on an engine, `rows` does the sums, `output` writes.
"""
