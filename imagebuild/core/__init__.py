"""Provide errors, files, programs, the network, YAML, the console: what all packages need. Knows nothing of images."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
