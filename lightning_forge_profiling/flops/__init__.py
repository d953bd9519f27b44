"""Floating-point operations: of a model, of an operator, and the peak rate of a device."""

from lightning_forge_profiling.lazy import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__)
