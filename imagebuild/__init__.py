"""Turn one matrix of versions into tested container images for GPU networking."""

__version__ = "0.1.0"
