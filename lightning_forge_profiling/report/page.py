"""Web pages: one file each, which loads nothing, made from the templates, scripts and style sheets in `assets/`."""

import hashlib
import re
from base64 import b64encode
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from jinja2 import Environment

_FOR_READERS: Final = re.compile(r"^ *//.*\n|^ +", re.MULTILINE)
"""Lines of comments, and indentation: for whoever changes a script. Each page would have 16 kB of them."""

# In JSON these are in strings only, where an escape means the same. Without them no name can end the block.
_ESCAPED: Final = "<>&\u2028\u2029"


def asset(name: str) -> str:
    """The text of a file in `assets/`."""
    return files("lightning_forge_profiling.report").joinpath("assets", name).read_text(encoding="utf-8")


def rendered(template: str, **values: Any) -> str:
    """Render a template of `assets/`; values are escaped."""
    return _environment().get_template(template).render(values)


def web_page(template: str, *, styles: tuple[str, ...] = (), scripts: tuple[str, ...] = (), **values: Any) -> str:
    """Render a template that extends `page.html`.

    The content security policy blocks every request, and any style and script but the page's own, named by their hash:
    a name in a trace could not run even if it got into the page as markup.
    """
    style = "".join(asset(f"{name}.css") for name in ("report", *styles))
    script = "\n".join(["'use strict';", *(_FOR_READERS.sub("", asset(f"{name}.js")) for name in scripts)])
    sources = f"script-src {_source(script)}; " if scripts else ""
    policy = (
        f"default-src 'none'; {sources}style-src {_source(style)}; img-src data:; base-uri 'none'; form-action 'none'"
    )
    return rendered(template, style=style, script=script, policy=policy, **values)


def embedded(content: Any) -> str:
    """JSON that can stand in a `<script>` element."""
    text = msgspec.json.encode(content, enc_hook=dict).decode()  # the hook is for mappings that are no dict
    for character in _ESCAPED:
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, FunctionLoader, StrictUndefined  # noqa: PLC0415  (only where HTML is made)

    from lightning_forge_profiling.plain_text import plain  # noqa: PLC0415

    def finalize(value: Any) -> Any:
        return plain(value) if type(value) is str else value  # Markup is ours

    return Environment(
        loader=FunctionLoader(asset),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _source(text: str) -> str:
    """How a content security policy names a script or style that is in the page itself.

    Example:
        >>> _source("")
        "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
    """
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
