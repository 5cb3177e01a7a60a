"""Read what benchmarks print, and compare it with what hardware can do. Knows nothing of images."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
