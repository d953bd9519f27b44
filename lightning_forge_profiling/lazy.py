"""Public names that are imported when they are first used, as a package's `__init__.pyi` lists them."""

import re
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def names_of_stub(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package."""
    spec: Any = sys.modules[package].__spec__
    stub = spec.loader.get_data(f"{spec.origin}i").decode()  # from archives, too
    lines = re.findall(r"^from (\S+) import (\w+) as \2$", stub, re.MULTILINE)
    modules = {name: package + module for module, name in lines}

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(modules), sorted(modules)
