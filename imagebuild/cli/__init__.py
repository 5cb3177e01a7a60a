"""Provide the command line: options, printing and exit codes."""
