"""Define the types of every file of a project, and compute what the files say together: the plan."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
