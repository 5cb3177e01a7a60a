"""Build rendered targets with BuildKit, on an engine that is found or started here."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
