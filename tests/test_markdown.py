"""What GitHub makes of the Markdown report: nothing from a trace may link, notify, or be markup in it."""

import gzip
import html.parser
import json
import re
from pathlib import Path

import cmarkgfm
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lightning_forge_profiling.names import FINDING_PAGES, docs_url
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.plain_text import plain
from lightning_forge_profiling.report.markdown import code, code_cell, markdown, prose

SYNC_STACK = Path(__file__).parent / "data" / "traces" / "sync_stack" / "rank0.trace.json.gz"

# What GitHub looks for in a page's text once Markdown has become HTML; it leaves code alone.
LOOKED_FOR = {
    "mention": r"(?:^|\W)@[a-z0-9]",
    "issue": r"(?:^|\W)#\d|\w#\d|\bgh-\d",
    "commit": r"\b[0-9a-f]{7,40}\b",
    "advisory": r"\b(?:cve|ghsa)-\w",
    "ticket": r"\b[a-z]+-\d",
    "emoji": r":[a-z0-9_+-]+:",
    "mathematics": r"\$[^$]+\$",
    "address": r"https?://|\bwww\.|\w@\w",
}
CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]")


class Page(html.parser.HTMLParser):
    """The tags of a page, its text, and the part of it that is not code."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.text, self.outside = [], [], "", ""
        self._in_code = 0
        self.feed(cmarkgfm.github_flavored_markdown_to_html(text))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in {"href", "src"}]
        self._in_code += tag in {"code", "pre"}

    def handle_endtag(self, tag):
        self._in_code -= tag in {"code", "pre"}

    def handle_data(self, data):
        self.text += data
        self.outside += "\0" if self._in_code else data  # GitHub looks at each piece of text on its own

    def handle_comment(self, data):
        self.tags.append("markup")  # what stands for HTML that is not shown

    @property
    def found(self):
        return {
            name: match[0]
            for name, pattern in LOOKED_FOR.items()
            if (match := re.search(pattern, self.outside, re.IGNORECASE))
        }


PLACES = ["{}", "**Verdict:** {}", "- {}", "1. **a**: {}\n   - {}", "| a | b |\n|---|---|\n| {} | {} |"]
NAMES = [
    "@octocat", "NVIDIA @octocat/team", "(@a)", "@a,@b", "a@example.com", "git@github.com:o/r.git",
    "https://example.com", "see www.example.com.", "ftp://a.b/c", "xmpp:a@b.c", "#12", "(#12)", "o/r#12", "GH-12",
    "gh-12", "o@deadbeef", "deadbeefcafe", "9f2c1d7", "TICKET-7", "CVE-2026-1234", "GHSA-w37p-236h-pfx3", ":smile:",
    "a:+1:b", "$x$", "$`x`$", "<b>x</b>", "<!-- x -->", "<script>alert(1)</script>", "&lt;", "&#64;octocat", "[a](b)",
    "![a](b)", "[^1]", "[ ] x", "*a*", "__a__", "~~a~~", "a|b", "\\|", "\\", "`", "``` a", "~~~ a", "`@a`",
    "``@a", "@a`|`@b\\|@c",
    "# x", "- x", "+ x", "* x", "> x", "1. x", "12) x", "===", "---", "    x", "\tx", "a\n\n# b", "a\r\n- @b",
    "\u202e@octocat", "@\u200boctocat", "\x1b[31m@a", "a  ", "|---|", "@a\u00a0@b", "C:\\a\\@b",
]  # fmt: skip


def shown_only(page, bare, name):
    """Nothing but a name was added to a page, and GitHub does nothing with it."""
    assert [tag for tag in page.tags if tag != "code"] == bare.tags
    assert page.links == []
    assert page.found == {}
    assert "".join(plain(name).split()) in "".join(page.text.split())
    return True


@pytest.mark.parametrize("name", NAMES)
def test_no_name_does_anything_on_github(name):
    for place in PLACES:
        count = place.count("{}")
        assert shown_only(Page(place.format(*[prose(name)] * count)), Page(place.format(*"x" * count)), name)


pieces = st.sampled_from([*NAMES, *"@#|`\\*_-+.)(<>&;:!~$= x1", "www.", "://", "a"])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(pieces, max_size=8).map("".join), st.sampled_from(PLACES))
def test_nor_does_any_made_of_such_pieces(name, place):
    assume(plain(name).strip())
    count = place.count("{}")
    assert shown_only(Page(place.format(*[prose(name)] * count)), Page(place.format(*"x" * count)), name)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(pieces, max_size=8).map("".join))
def test_a_code_span_is_one_span_whatever_it_holds(name):
    for text in (f"# Profile of {code(name)}", f"| a |\n|---|\n| {code_cell(name)} |"):
        page = Page(text)
        assert page.tags.count("code") == 1
        assert page.links == []
        assert page.found == {}
        assert not {"markup", "em", "strong", "del", "ul", "ol", "hr", "pre"} & set(page.tags)


def test_a_long_name_takes_no_long_time():
    for text in ("a", "a-", ":a", "`", "a@", "0", "\\", "|", "_", ".,", "www."):
        prose(text * (100_000 // len(text)))


HARM = "@octocat https://evil.example/x o/r#12 GH-7 deadbeefcafe :bug: $x$ <img src=x> [a](b) |\n# b \u202e`"


def report_of(folder, name):
    """The report of a trace in which file, device, regions, kernels, operators and stacks are called so."""
    trace = json.loads(gzip.decompress(SYNC_STACK.read_bytes()))
    for device in trace["deviceProperties"]:
        device["name"] = f"NVIDIA {name}"
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel" or event.get("name", "").startswith("aten::"):
            event["name"] += name
        elif event.get("cat") == "python_function":
            event["name"] = event["name"].replace(".py(", f"{name}.py(").replace("torch/", "")
    [forward, *_] = [event for event in trace["traceEvents"] if event.get("name") == "forge.forward"]
    trace["traceEvents"].append({**forward, "name": f"forge.{name}"})
    trace["traceEvents"].append({"ph": "X", "cat": "kernel", "name": name})  # without a time, which is a warning
    folder.mkdir()
    path = folder / f"rank0 {name}.trace.json".replace("/", ":")
    path.write_text(json.dumps(trace), encoding="utf-8")
    return markdown(analyze(path).analysis)


def test_a_trace_full_of_such_names_makes_a_report_that_only_shows_them(tmp_path):
    report, tame = report_of(tmp_path / "harm", HARM), report_of(tmp_path / "tame", "x")
    page = Page(report)
    assert report.count("@octocat") > 20
    assert CONTROLS.search(report) is None
    assert {*page.links} < {"https://ui.perfetto.dev", *map(docs_url, FINDING_PAGES)}
    assert page.found == {}
    blocks = {"h1", "h2", "table", "ul", "ol", "pre", "hr", "blockquote"}
    assert [tag for tag in page.tags if tag in blocks] == [tag for tag in Page(tame).tags if tag in blocks]
    assert set(page.tags) == set(Page(tame).tags), "and no mark-up of another kind"
    assert "on NVIDIA @octocat" in page.text
