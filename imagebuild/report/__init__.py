"""Report the results of benchmarks and checks to people and to CI."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
