"""Floating-point operations: of a model, of an operator, and the peak rate of a device."""
