"""Assets, templates and content security policies of the package's web pages."""

import hashlib
import re
from base64 import b64encode
from collections.abc import Mapping
from importlib.resources import files


def asset(name: str) -> str:
    """The text of a file in `assets/`."""
    return files("lightning_forge_profiling.report").joinpath("assets", name).read_text(encoding="utf-8")


def page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """A whole page. Its content security policy blocks every request, and any other style or script."""
    style = asset("report.css") + style
    scripts = f"script-src {_source(script)}; " if script else ""
    values = {
        "policy": f"default-src 'none'; {scripts}style-src {_source(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        "title": title,
        "style": style,
        "body": body,
    }
    return filled(asset("page.html"), values)


def _source(text: str) -> str:
    """How a content security policy names a script or style that is in the page itself.

    Example:
        >>> _source("")
        "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
    """
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def scrolling_table(head: str, rows: str) -> str:
    """A table that scrolls where the screen is too narrow for it, from the cells of its head and its rows."""
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def filled(template: str, values: Mapping[str, str]) -> str:
    """A template with each `{{name}}` replaced by its value; values are not searched for names.

    Example:
        >>> filled("<p>{{text}}</p>", {"text": "{{text}}"})
        '<p>{{text}}</p>'
    """
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], template)
