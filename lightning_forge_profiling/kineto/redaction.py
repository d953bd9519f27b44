"""Names of a trace without users, hosts, paths and addresses."""

import re
from collections.abc import Iterable
from typing import Final

_REMOVED: Final = "…"

_FRAME: Final = re.compile(r"(?P<file>.+?\.pyx?)(?P<line>\(\d+\): .*)", re.DOTALL)  # as the profiler names functions
_INSTALLED: Final = re.compile(r".*(?:(?:site|dist)-packages|lib/python3[\w.]*)/", re.DOTALL)
_OUTSIDE: Final = re.compile(r"/|~|[A-Za-z]:|(?:home|Users)/")
_FILE_NAME: Final = re.compile(r"[\w+-][\w.+-]*\.\w{1,10}")

# A path continues after a space if a separator follows before the next space: /home/a b/c.py.
_PATH: Final = r"""[^\s"'`,;:<>|(){}\[\]]*(?:\ [^\s/\\]*[/\\][^\s"'`,;:<>|(){}\[\]]*)*"""
_ROOT: Final = r"(?:(?<![\w./\\])~?/(?![\s/])|(?<!\w)[A-Za-z]:[/\\]|\\\\)"
_PATHS: Final = re.compile(rf"(?:(?<='){_ROOT}[^']*(?=')|(?<=\"){_ROOT}[^\"]*(?=\")|{_ROOT}{_PATH})", re.VERBOSE)
_ADDRESSES: Final = re.compile(
    r"(?<![\w.+-])[\w.+-]*(?:://\S+|@[\w.-]+)"  # an address, or a user on a host
    r"|(?:\b(?:GPU|MIG)-)?\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
    r"|\b(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b"  # on the PCI bus
    r"|\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b"
    r"|(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])",
    re.IGNORECASE,
)

_HOME: Final = re.compile(r"(?:[/\\](?:home|Users)[/\\]+|torchinductor_)([\w.-]+)")
_SHORTEST: Final = 3
# Shared accounts, and words that a trace is unreadable without.
_NOT_IDENTITIES: Final = frozenset({
    "root", "user", "users", "admin", "home", "shared", "public", "ubuntu", "runner", "jovyan", "localhost", "python",
    "torch", "cuda", "gpu", "nccl", "aten", "data", "transfer", "forward", "backward", "optimizer", "other", "train",
    "training", "step", "model", "module", "kernel", "forge",
})  # fmt: skip


def identities_in(text: str) -> set[str]:
    r"""Users whose home folder or cache a text names.

    Example:
        >>> sorted(identities_in("/home/ada/train.py, C:\\Users\\eve\\x, /tmp/torchinductor_bob/ab/c.py"))
        ['ada', 'bob', 'eve']
    """
    return set(_HOME.findall(text))


class Redaction:
    """Removes users, hosts, paths and addresses from names.

    Of an absolute path the file name stays, of a file in an installed package the path below `site-packages/`. Web,
    mail, network and device addresses, UUIDs and the given identities are removed.

    Example:
        >>> redaction = Redaction({"ada"})
        >>> redaction("/home/ada/gpt/train.py(88): step")
        'train.py(88): step'
        >>> redaction("/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py(1783): _call_impl")
        'torch/nn/modules/module.py(1783): _call_impl'
        >>> redaction("load ada's /data/ada/shard 7 of ada@node17 (GPU-0f3a4d5e-1111-2222-3333-444455556666)")
        "load …'s … 7 of … (…)"
    """

    def __init__(self, identities: Iterable[str] = ()) -> None:
        words = {
            word
            for word in identities
            if len(word) >= _SHORTEST and not word.isdecimal() and word.lower() not in _NOT_IDENTITIES
        }
        # the longest first: node17.cluster before node17
        longest = "|".join(map(re.escape, sorted(words, key=lambda word: (-len(word), word))))
        self._words = re.compile(rf"(?<![^\W_])(?:{longest})(?![^\W_])", re.IGNORECASE) if words else None
        self._cache: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        """The redacted text."""
        redacted = self._cache.get(text)
        if redacted is None:
            redacted = self._cache[text] = self._redacted(text)
        return redacted

    def _redacted(self, text: str) -> str:
        frame = _FRAME.fullmatch(text)
        if frame:
            file = frame["file"].replace("\\", "/")
            installed = _INSTALLED.match(file)
            if installed:
                file = file[installed.end() :]
            elif _OUTSIDE.match(file):
                file = file.rpartition("/")[2]
            text = file + frame["line"]
        text = _PATHS.sub(_file_name, _ADDRESSES.sub(_REMOVED, text))
        return self._words.sub(_REMOVED, text) if self._words else text


def _file_name(path: re.Match[str]) -> str:
    """The last part of a path if it looks like a file name; a folder's name is removed."""
    name = re.split(r"[/\\]", path[0])[-1]
    return name if _FILE_NAME.fullmatch(name) else _REMOVED
