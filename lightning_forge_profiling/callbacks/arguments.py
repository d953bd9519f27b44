"""Checks the arguments of the callbacks."""

from math import isfinite
from numbers import Real
from typing import Final

from lightning_forge_profiling.errors import ConfigurationError

_OPERATIONS: Final = {
    "flops_per_batch": (1e3, "operations, as 2.5e12"),
    "peak_flops": (1e9, "operations a second, as 989e12"),
}
"""Smaller values are a mistake of unit: the lowest plausible value, and an example of a right one."""


def refuse_unless_between(lowest: float, value: object, above: float, rule: str) -> None:
    """Raise ConfigurationError unless a value is None or a number from `lowest` to below `above`; `rule` says so."""
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not lowest <= value < above:
        raise ConfigurationError(f"{rule}; got {value!r}.")


def refuse_unless_function(name: str, value: object) -> None:
    """Raise ConfigurationError unless a value is None or can be called with a batch."""
    if value is not None and not callable(value):
        raise ConfigurationError(f"{name} must be a function of the batch, got {value!r}.")


def refuse_unless_integer(name: str, value: object) -> None:
    """Raise ConfigurationError unless a value is an integer >= 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigurationError(f"{name} must be an integer >= 0, got {value!r}.")


def refuse_unless_operations(name: str, value: object) -> None:
    """Raise ConfigurationError unless a value is None or a number of operations, and not one in tera."""
    if value is None:
        return
    if not isinstance(value, Real) or isinstance(value, bool) or not isfinite(value) or value <= 0:
        got = f"a {type(value).__name__}: give its .total" if hasattr(value, "total") else repr(value)
        raise ConfigurationError(f"{name} must be a number of operations above 0, got {got}.")
    fewest, unit = _OPERATIONS[name]
    if value < fewest:
        raise ConfigurationError(f"{name} is in {unit}; got {value!r}.")
