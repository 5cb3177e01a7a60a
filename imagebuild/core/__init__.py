"""Provide errors, files, programs, the network, YAML, the console: what all packages need. Knows nothing of images."""
