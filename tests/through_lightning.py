"""Which tests go through Lightning, and so have to be run with its lowest version too."""

import functools
import re
import sys
from pathlib import Path

TESTS = Path(__file__).parent
_USES = re.compile(r"^ *(?:import|from) (?:lightning|pytorch_lightning)\b|\bquiet_trainer\b", re.MULTILINE)
_SCRIPTS = [*TESTS.glob("scripts/*.py"), *TESTS.parent.glob("examples/*.py")]


def goes_through_lightning(item):
    """Whether a test gets a Trainer, or its file imports Lightning or makes a Trainer or starts a script that does."""
    return "make_trainer" in item.fixturenames or _file_does(item.path)


@functools.cache
def _file_does(path):
    text = path.read_text(encoding="utf-8")
    scripts = (script for script in _SCRIPTS if f'"{script.name}"' in text)
    return any(_USES.search(source) for source in (text, *(script.read_text(encoding="utf-8") for script in scripts)))


def refuse_trainers(monkeypatch):
    """Let no Trainer be made in this process."""
    module = sys.modules.get("lightning.pytorch.trainer.trainer")
    if module is not None:
        monkeypatch.setattr(module.Trainer, "__init__", _refused)


def _refused(*_args, **_options):
    raise AssertionError(
        "This test goes through Lightning, and tests/through_lightning.py does not know: use the fixture make_trainer, "
        "or import Lightning in the test's own file."
    )
