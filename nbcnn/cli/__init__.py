"""This package is the command line: flags, messages, exit codes. The library imports nothing of it."""
