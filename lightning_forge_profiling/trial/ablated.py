"""Runs a script without one call: what does a metric, a callback or a logger at a line cost?

python -c "from lightning_forge_profiling.trial.ablated import main; main()" [-m] SCRIPT [arguments ...]
"""

import ast
import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.safe_files import read_regular

ABLATED: Final = "FORGE_PROFILING_ABLATED"
"""Environment variable: file and line of the call to leave out."""


class _Remover(ast.NodeTransformer):
    """Takes away the innermost call at a line whose value nobody uses."""

    def __init__(self, line: int) -> None:
        self._line, self.removed = line, ""

    def _is_it(self, node: ast.expr) -> bool:
        at_line = node.lineno <= self._line <= (node.end_lineno or node.lineno)
        return isinstance(node, ast.Call) and at_line and not ast.unparse(node).startswith("super()")

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """A call that is a statement."""
        if not self._is_it(node.value):
            return self.generic_visit(node)
        inner = self.generic_visit(node)
        if self.removed:  # an element of a list in it, as a callback
            return inner
        self.removed = ast.unparse(node.value)
        return ast.copy_location(ast.Pass(), node)

    def visit_List(self, node: ast.List) -> ast.AST:
        """A call that is an element of a list, as of callbacks."""
        for each in node.elts:
            if self._is_it(each) and not self.removed and len({one.lineno for one in node.elts}) in {1, len(node.elts)}:
                self.removed = ast.unparse(each)
                return ast.copy_location(ast.List([one for one in node.elts if one is not each], node.ctx), node)
        return self.generic_visit(node)


def without_call(source: bytes, file: str, line: int) -> tuple[ast.Module, str]:
    r"""A script without the call at a line, and that call; refuses a line without one that can be left out.

    Args:
        source: the script.
        file: its name, for messages.
        line: counted from 1.

    Examples:
        >>> import ast
        >>> tree, removed = without_call(b"x = 1\nprint(x)\n", "a.py", 2)
        >>> ast.unparse(tree), removed
        ('x = 1\npass', 'print(x)')
    """
    try:
        tree = ast.parse(source, file)
    except (SyntaxError, ValueError) as exc:
        raise ConfigurationError(f"{file} cannot be read as Python: {exc}") from exc
    remover = _Remover(line)
    tree = ast.fix_missing_locations(remover.visit(tree))
    if not remover.removed:
        raise ConfigurationError(
            f"{file}:{line} has no call that can be left out. Name the line of a call whose value is not used, such as "
            "self.log(...), metric.update(...), or a callback in the list of callbacks"
        )
    return tree, remover.removed


def place(text: str) -> tuple[Path, int]:
    """File and line of `FILE:LINE`; refuses a file that does not exist."""
    name, _, line = text.rpartition(":")
    if not name or not line.isdecimal() or not Path(name).is_file():
        raise ConfigurationError(f"{text}: give a file and a line of it, as model.py:41")
    return Path(os.path.abspath(name)), int(line)  # noqa: PTH100  (links stay as imports name them)


left_out = ""  # where this process has left out the call: in `the script`, or `a module` of it


def _code(file: Path, line: int, of: str) -> CodeType:
    global left_out  # noqa: PLW0603  (of the process)
    left_out = of
    tree, _ = without_call(read_regular(file), str(file), line)
    return compile(tree, str(file), "exec", dont_inherit=True)


def install(text: str) -> None:
    """Have the named file compiled without that call when it is imported."""
    file, line = place(text)
    get_code = SourceFileLoader.get_code

    def changed(loader: SourceFileLoader, fullname: str) -> Any:
        path = loader.get_filename(fullname)
        same = os.path.abspath(path) == str(file)  # noqa: PTH100
        return _code(file, line, "a module") if same else get_code(loader, fullname)

    SourceFileLoader.get_code = changed  # type: ignore[method-assign, assignment]


def main() -> None:
    """Run the script as Python would, without the call if it has that."""
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    script = Path(os.path.abspath(sys.argv[0]))  # noqa: PTH100
    sys.path[0] = str(script.parent)
    file, line = place(os.environ[ABLATED]) if ABLATED in os.environ else (None, 0)
    code = _code(script, line, "the script") if script == file else compile(read_regular(script), str(script), "exec")
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = str(script)
    exec(code, module.__dict__)  # noqa: S102  (the user's script)
