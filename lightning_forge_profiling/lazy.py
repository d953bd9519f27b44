"""Public names that are imported when they are first used, as a package's `__init__.pyi` lists them."""

import ast
import pkgutil
import sys
from collections.abc import Callable
from importlib import import_module


def names_of_stub(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package."""
    stub = ast.parse(pkgutil.get_data(package, "__init__.pyi") or b"")
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    modules = {alias.name: f"{package}.{node.module}" for node in imports for alias in node.names}

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *modules}), sorted(modules)
