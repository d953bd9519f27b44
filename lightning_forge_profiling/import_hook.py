"""Functions that are called with a module once the script has imported it."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

Hook = Callable[[ModuleType], None]


def after_import(hooks: Mapping[str, Hook]) -> None:
    """Call each function, by the name of its module, after that module's first import."""
    sys.meta_path.insert(0, _Finder(hooks))


class _Finder(MetaPathFinder):
    """Finds no module itself."""

    def __init__(self, hooks: Mapping[str, Hook]) -> None:
        self._hooks = dict(hooks)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, with the hook after its execution."""
        hook = self._hooks.pop(fullname, None)
        if hook is None:
            return None
        finders = (each for each in sys.meta_path if each is not self)
        spec = next(filter(None, (each.find_spec(fullname, path, target) for each in finders)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                hook(module)

            cast("Any", spec.loader).exec_module = exec_module
        return spec
