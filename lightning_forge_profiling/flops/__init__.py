"""Floating-point operations: what a model needs, what an operator computed, what a device can do at most."""
