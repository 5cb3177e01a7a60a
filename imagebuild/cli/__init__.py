"""The command line: options, printed results and exit codes."""
