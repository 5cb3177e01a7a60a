"""Give tags to verified digests, with their evidence; list, compare, scan and prune what was published."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
