"""Assets, templates and content security policies of the package's web pages."""

import hashlib
import re
from base64 import b64encode
from collections.abc import Mapping
from importlib.resources import files


def asset(name: str) -> str:
    """The text of a file in `assets/`."""
    return files("lightning_forge_profiling.report").joinpath("assets", name).read_text(encoding="utf-8")


def source(text: str) -> str:
    """How a content security policy names a script or style that is in the page itself.

    Example:
        >>> source("")
        "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
    """
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def filled(template: str, values: Mapping[str, str]) -> str:
    """A template with each `{{name}}` replaced by its value; values are not searched for names.

    Example:
        >>> filled("<p>{{text}}</p>", {"text": "{{text}}"})
        '<p>{{text}}</p>'
    """
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], template)
