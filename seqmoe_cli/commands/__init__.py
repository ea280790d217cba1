"""One file for each command of the command line; none imports torch before it runs."""
