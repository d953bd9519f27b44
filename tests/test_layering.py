"""Which room may import which, and which names are public."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import lightning_forge_profiling

PACKAGE = "lightning_forge_profiling"
ROOT = Path(lightning_forge_profiling.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

# Any module may import these, and they import nothing of ours.
COMMON = {
    "errors": set(),
    "guard": {"plain_text"},
    "kernel_name": {"plain_text"},
    "lazy": set(),
    "names": set(),
    "plain_text": set(),
    "safe_files": set(),
    "torch_versions": set(),
}

# What each room may import besides the standard library, COMMON and itself, lowest first: no room imports a later one.
MAY_IMPORT = {
    "host": set(),
    "schema": {"msgspec"},
    "json_layout": {"msgspec", "schema"},
    "timing": {"numpy", "msgspec", "torch", "schema"},
    "gpu": {"torch"},
    "flops": {"torch", "msgspec"},
    "kineto": {"numpy", "msgspec", "schema"},
    "analysis": {"numpy", "msgspec", "flops", "schema", "kineto"},
    "diagnosis": {"msgspec", "flops", "schema", "analysis"},
    "processes": set(),
    "pipeline": {"numpy", "msgspec", "host", "processes", "schema", "kineto", "analysis", "diagnosis", "json_layout"},
    "what_if": {"numpy", "schema", "kineto", "analysis", "diagnosis", "pipeline"},
    "record": {"msgspec", "schema", "json_layout"},
    "report": {"msgspec", "jinja2", "timing", "schema", "diagnosis", "record", "json_layout"},
    "ranks": {"torch", "msgspec", "host", "schema"},
    "comparison": {"numpy", "msgspec", "timing", "schema", "diagnosis", "record", "report"},
    "bench": {"torch", "numpy", "msgspec", "host", "timing", "gpu", "schema", "comparison"},
    "crossover": {"torch", "msgspec", "host", "flops", "report", "bench", "json_layout"},
    "finish": {"host", "kineto", "diagnosis", "pipeline", "record", "report"},
    "profiler": {"torch", "msgspec", "processes", "schema", "pipeline", "report", "finish"},
    "run": {
        "torch", "msgspec", "fsspec",
        "host", "timing", "gpu", "flops", "schema", "diagnosis", "report", "record", "ranks", "profiler", "json_layout",
    },
    "callbacks": {
        "torch", "msgspec", "lightning", "pytorch_lightning",
        "timing", "gpu", "flops", "schema", "diagnosis", "report", "profiler", "run",
    },
    "import_hook": set(),
    "trial": {
        "msgspec",
        "host", "timing", "schema", "diagnosis", "processes", "record", "report", "comparison", "run", "import_hook",
    },
    "hugging_face": {"transformers", "callbacks", "timing"},
    "entry_point": {"callbacks", "run", "import_hook", "trial", "hugging_face"},
    "loop": {"callbacks", "timing", "entry_point"},
    "at_start": {"entry_point"},
    "compat": {"torch", "timing"},
    "result_types": {"timing", "flops", "schema", "pipeline", "report", "bench", "profiler"},
    "cli": {
        "msgspec", "fsspec", "schema", "kineto", "analysis", "pipeline", "what_if", "report", "record",
        "bench", "comparison", "crossover", "trial", "entry_point", "json_layout",
    },
    "__main__": {"cli"},
    "__init__": {"report"},  # by name: `schema` imports it when a result is shown
}  # fmt: skip

parsed = cache(ast.parse)
MODULE = re.compile(rf"{PACKAGE}(\.\w+)+")


def room_of(module: Path) -> str:
    return module.relative_to(ROOT).parts[0].removesuffix(".py")


def without_type_checking(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below `node` that runs: all but the bodies of `if TYPE_CHECKING`."""
    left = [node]
    while left:
        each = left.pop()
        yield each
        if isinstance(each, ast.If) and ast.unparse(each.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            left += reversed(each.orelse)
        else:
            left += reversed([*ast.iter_child_nodes(each)])


def imports(source: str, package: tuple[str, ...]) -> Iterator[str]:
    """The full names that `source`, a module of `package`, imports at run time."""
    for node in without_type_checking(parsed(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            prefix = ".".join((*base, *([node.module] if node.module else [])))
            yield from (f"{prefix}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE.fullmatch(node.value):
            yield node.value  # a module that is run as a process of its own


def forbidden(source: str, module: Path) -> list[str]:
    room = room_of(module)
    allowed = COMMON[room] if room in COMMON else MAY_IMPORT[room] | COMMON.keys() | {room}
    found = []
    for name in imports(source, (PACKAGE, *module.relative_to(ROOT).parent.parts)):
        top, *rest = name.split(".")
        target = rest[0] if top == PACKAGE and rest else top
        if target not in allowed and not (top == target and top in sys.stdlib_module_names):
            found.append(name)
    return found


def test_no_room_may_import_a_later_one():
    rooms = list(MAY_IMPORT)
    assert [(room, other) for room in rooms for other in MAY_IMPORT[room] & {*rooms[rooms.index(room) :]}] == []


def test_the_architecture_page_has_these_rooms_and_files_that_exist():
    page = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    apart = {"entry_point", "compat", "result_types", "__main__", "__init__"}
    assert re.findall(r"^\| `(\w+)/?` \|", page, re.MULTILINE) == [room for room in MAY_IMPORT if room not in apart]
    files = set(re.findall(r"`(\w+/\w+\.py)`", page))
    assert [file for file in files if not (ROOT / file).exists() and not (ROOT.parent / file).exists()] == []


def test_each_room_imports_only_what_it_may():
    rooms = {room_of(module) for module in MODULES}
    assert rooms <= COMMON.keys() | MAY_IMPORT.keys(), "a new room: say in MAY_IMPORT what it may import"
    violations = [
        f"{module.relative_to(ROOT)} imports {name}, which MAY_IMPORT does not allow {room_of(module)!r}"
        for module in MODULES
        for name in forbidden(module.read_text(encoding="utf-8"), module)
    ]
    assert not violations, "\n".join(["", *violations])


def files_that(module: Path, known: Mapping[str, Path]) -> Iterator[Path]:
    """The files that a module imports: at its top, in a function, for types alone, or by a string."""
    package = module.parent.relative_to(ROOT.parent).parts
    for node in ast.walk(parsed(module.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            origin = ".".join((*base, *([node.module] if node.module else [])))
            names = [f"{origin}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE.fullmatch(node.value):
            names = [node.value]
        for name in names:
            if file := known.get(name) or known.get(name.rpartition(".")[0]):
                yield file


def circles(imported: Mapping[Path, set[Path]]) -> list[set[Path]]:
    """The sets of files that import each other, by whatever way round."""
    reached: dict[Path, set[Path]] = {}
    for file in imported:
        found, left = set(), [*imported[file]]
        while left:
            other = left.pop()
            if other not in found:
                found.add(other)
                left += imported[other]
        reached[file] = found
    each = {frozenset(other for other in reached[file] if file in reached[other]) for file in imported}
    return [set(circle) for circle in each if circle]


def test_no_files_import_each_other_in_a_circle():
    files = [module for module in MODULES if module.name != "__init__.py"]
    known = {".".join(file.relative_to(ROOT.parent).with_suffix("").parts): file for file in files}
    imported = {file: set(files_that(file, known)) for file in files}
    assert circles(imported) == []


@pytest.mark.parametrize(
    ("source", "module", "expected"),
    [
        ("import torch.cuda", "kineto/trace.py", ["torch.cuda"]),
        ("def load():\n    from torch import cuda", "kineto/trace.py", ["torch.cuda"]),
        ("try:\n    import lightning\nexcept ImportError: pass", "compat.py", ["lightning"]),
        ("from .. import callbacks", "timing/steps.py", [f"{PACKAGE}.callbacks"]),
        ("from ..callbacks import throughput", "timing/steps.py", [f"{PACKAGE}.callbacks.throughput"]),
        (f"from {PACKAGE} import region", "callbacks/throughput.py", [f"{PACKAGE}.region"]),
        (f"from {PACKAGE}.cli import main", "callbacks/throughput.py", [f"{PACKAGE}.cli.main"]),
        ("from .timing import steps", "errors.py", [f"{PACKAGE}.timing.steps"]),
        ("if TYPE_CHECKING:\n    import torch\nelse:\n    import rich", "kineto/trace.py", ["rich"]),
        ("from .steps import StepTimes\nfrom ..errors import TimerError\nimport json", "timing/collection.py", []),
        ("from . import steps", "timing/__init__.py", []),
        (f"RUN = '{PACKAGE}.cli.main'", "profiler/child.py", [f"{PACKAGE}.cli.main"]),
    ],
)
def test_the_check_sees_every_way_to_import(source, module, expected):
    assert forbidden(source, ROOT / module) == expected


@pytest.mark.parametrize(
    "statement",
    [
        f"import {PACKAGE}.analysis",
        f"import {PACKAGE}.cli",
        f"from {PACKAGE} import analyze, Analysis; from {PACKAGE}.report import write_reports",
    ],
)
def test_reading_traces_needs_no_torch(statement):
    program = f"import sys; {statement}; print(*{{'torch', 'lightning', 'pytorch_lightning'}} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert loaded.split() == []


def test_every_message_that_is_logged_is_plain_text():
    """A name of a device or a file, or an exception's text, may hold what steers a terminal."""
    direct = [module for module in MODULES if "getLogger" in module.read_text(encoding="utf-8")]
    assert direct == [ROOT / "plain_text.py"]


READERS = {
    *("open", "FileIO", "read_text", "read_bytes", "load", "fromfile", "memmap", "loadtxt", "genfromtxt"),
    *("copyfile", "copy2", "copytree", "ZipFile"),
}
"""Functions that open a path, or may."""


def opened_to_read(source: str) -> list[str]:
    """The calls that may open a file to read: not those that name a mode or a flag of writing, or O_PATH."""
    found = []
    for node in ast.walk(parsed(source)):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name not in READERS:
            continue
        call = ast.unparse(node)
        given = [*node.args, *(each.value for each in node.keywords)]
        modes = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        written = any(re.fullmatch("[wax]b?", mode) for mode in modes) or re.search(r"O_WRONLY|O_PATH|NEW", call)
        other = re.match(r"webbrowser\.open|self\.open\(\)|files\(", call)  # a page, a sensor, our own resources
        if not written and not other:
            found.append(call)
    return found


def test_only_one_function_opens_files_to_read():
    found = {module: calls for module in MODULES if (calls := opened_to_read(module.read_text(encoding="utf-8")))}
    assert found == {
        ROOT / "safe_files.py": ["FileIO(os.fspath(path), opener=opened)", "os.open(name, _READ)"],
    }, "open it with safe_files.open_regular, or read_regular"


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("open(path)", True),
        ("path.open()", True),
        ("path.open('rb')", True),
        ("path.open('r+b')", True),
        ("open(path, mode='rb')", True),
        ("gzip.open(path)", True),
        ("os.open(path, os.O_RDONLY)", True),
        ("Path('a').read_text()", True),
        ("path.read_bytes()", True),
        ("np.load(path)", True),
        ("files('x').joinpath('y').read_bytes()", False),
        ("open(path, 'w')", False),
        ("gzip.open(file, 'wb')", False),
        ("os.open(os.devnull, os.O_WRONLY)", False),
        ("path.write_bytes(b'')", False),
    ],
)
def test_the_check_sees_every_way_to_read(source, reads):
    assert bool(opened_to_read(source)) is reads
