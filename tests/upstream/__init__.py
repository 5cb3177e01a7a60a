"""A local stand-in for the servers that the image `hpcx` is built from; see README.md in this folder."""
