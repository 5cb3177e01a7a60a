"""Find, read and copy images, wherever they are: layouts, registries, engines. Knows nothing of targets."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
