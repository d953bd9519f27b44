"""What the reports show, and that no name from a trace can do anything in them."""

import io
import json
import re
from itertools import pairwise, takewhile
from pathlib import Path

import jsonschema
import msgspec
import pytest
from markdown_it import MarkdownIt
from msgspec.structs import replace

from lightning_forge_profiling import ForgeProfilerCallback
from lightning_forge_profiling.cli.show import schema_json
from lightning_forge_profiling.diagnosis.verdict import decide
from lightning_forge_profiling.json_layout import summary_json
from lightning_forge_profiling.kernel_name import short, short_kernel_name
from lightning_forge_profiling.names import docs_url
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.plain_text import plain
from lightning_forge_profiling.report.markdown import code_cell, markdown, prose
from lightning_forge_profiling.report.page import report_page, write_reports
from lightning_forge_profiling.report.screen import Screen
from lightning_forge_profiling.report.terminal import print_analysis
from lightning_forge_profiling.safe_files import write_whole
from lightning_forge_profiling.schema import Analysis, Distribution, RunRegion
from tests.evidence import made_evidence
from tests.models import Classifier, loader
from tests.samples import ADD, GEMM, sample_analysis

TRACES = Path(__file__).parent / "data" / "traces"

HOSTILE = (
    "evil\x1b[31m\x1b]0;title\x07 \u202e|`</td>\n| x | ``b`` <script>alert(1)</script> "
    "**a** [l](javascript:x) \\| &lt;\\"
)
CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]")


def hostile(ranks=1):
    """The sample, every name in it replaced by one that means harm."""
    sample = sample_analysis(ranks)
    return replace(
        sample,
        source=HOSTILE,
        verdict_text=f"{sample.verdict}: {HOSTILE}",
        findings=tuple(replace(finding, title=HOSTILE, evidence={HOSTILE: HOSTILE}) for finding in sample.findings),
        hints=tuple(replace(hint, text=HOSTILE) for hint in sample.hints),
        collectives=tuple(replace(found, name=HOSTILE, group=HOSTILE) for found in sample.collectives),
        warnings=(HOSTILE,),
        differences=(HOSTILE,),
        ranks=tuple(
            replace(
                rank,
                file=HOSTILE,
                device=HOSTILE,
                top_kernels=tuple(replace(kernel, name=HOSTILE) for kernel in rank.top_kernels),
                operators=tuple(
                    replace(operator, name=HOSTILE, input_shapes=(HOSTILE,)) for operator in rank.operators
                ),
                regions=tuple(replace(region, name=HOSTILE) for region in rank.regions),
                host=replace(rank.host, syncs=tuple(replace(sync, where=HOSTILE) for sync in rank.host.syncs)),
                warnings=(f"{HOSTILE} rank",),
            )
            for rank in sample.ranks
        ),
    )


def printed(analysis, *, terminal=False, **options):
    text = io.StringIO()
    print_analysis(analysis, Screen(text, width=80, wrap=terminal, colours=False), **options)
    return text.getvalue()


def rendered(text):
    """The tokens of GitHub's dialect as far as reports use it."""
    return MarkdownIt("commonmark").enable("table").parse(text)


# --- console ---------------------------------------------------------------------------------------------------------


def test_the_verdict_comes_first_and_then_the_numbers_of_the_step():
    text = printed(sample_analysis())
    assert text.startswith("verdict     input-bound: the GPU waits 8.5 ms of each step for the data loader.")
    flat = re.sub(" +", " ", text)
    assert "3 steps, 50.000 to 58.300 ms, median 51.500 ms on NVIDIA H200" in flat
    assert "\nstep 53.267 100.0 %" in flat
    assert "\nbusy 33.025 62.0 %" in flat
    assert "\n matmul 20.241 38.0 %" in flat
    assert "\nidle 20.241 38.0 %" in flat
    assert "\n in the data loader 8.523 16.0 %" in flat
    assert "in cudaMalloc" not in flat, "a cause that cost nothing is not listed"


def test_findings_come_with_share_and_advice_and_the_rest_in_a_line_each():
    flat = " ".join(printed(sample_analysis()).split())
    assert "sync-bound 5.0 % rank 0: the host waits for the GPU 12 times a step Keep the loss on the device" in flat
    assert "60.9 % and 37.3 % of the dense bfloat16 peak of 989.5" in flat
    assert "hint aten::copy_ takes 6 % of the step" in flat
    assert "warning rank0.trace.json.gz: 2 events" in flat
    assert "warning step 7 is cut off" in flat


@pytest.mark.parametrize("ranks", [1, 4])
def test_no_table_needs_more_than_80_columns_nor_loses_a_number(ranks):
    text = printed(sample_analysis(ranks), operators=5, terminal=True)
    tables = text[: text.index("\ncompute ")]
    assert max(map(len, tables.splitlines())) <= 80
    assert not re.search(r"\d…", re.sub(r"(?m)^[^ ].*?…", "", tables)), "only names are shortened"
    for kernel in sample_analysis(ranks).ranks[-1].top_kernels[:8]:
        assert f"{kernel.ms_per_step:.3f}" in tables


@pytest.mark.parametrize("width", [50, 80, 120])
@pytest.mark.parametrize("scale", [1, 1e3, 1e6])
def test_where_a_table_is_too_wide_names_are_cut_and_no_number(width, scale):
    analysis = sample_analysis(1)
    names = ["autograd::engine::evaluate_function: " + "Convolution" * 9 + suffix for suffix in ("0", "1")]
    operators = tuple(
        replace(
            operator,
            name=name,
            calls_per_step=210.25 * scale,
            host_ms_per_step=4.125 * scale,
            self_host_ms_per_step=3.375 * scale,
            device_ms_per_step=8.625 * scale,
            self_device_ms_per_step=7.875 * scale,
            allocated_bytes_per_step=1e9 * scale,
        )
        for name, operator in zip(names, analysis.ranks[0].operators, strict=True)
    )
    kernels = tuple(replace(kernel, ms_per_step=5.375 * scale) for kernel in analysis.ranks[0].top_kernels)
    analysis = replace(analysis, ranks=(replace(analysis.ranks[0], operators=operators, top_kernels=kernels),))
    text = io.StringIO()
    print_analysis(analysis, Screen(text, width=width, wrap=True, colours=False), kernels=3, operators=2)
    words = text.getvalue().split()
    numbers = [f"{number * scale:.3f}" for number in (4.125, 3.375, 8.625, 7.875)]
    numbers += [f"{210.25 * scale:.2f}".rstrip("0").rstrip("."), f"{1e3 * scale:.1f}"]
    assert {number: words.count(number) for number in numbers} == dict.fromkeys(numbers, 2)
    assert words.count(f"{5.375 * scale:.3f}") == 3
    tables = text.getvalue().partition("Top kernels")[2].partition("\ncompute ")[0]
    assert max(map(len, tables.splitlines())) <= width


def test_many_ranks_have_a_row_each_and_who_waits_is_shown():
    text = printed(sample_analysis(4))
    assert [line.split()[:2] for line in text.splitlines() if re.match(r"\d +5\d\.\d{3}", line)] == [
        ["0", "53.267"],
        ["1", "53.467"],
        ["2", "53.667"],
        ["3", "53.867"],
    ]
    assert re.search(r"(?m)^0 .* 0\.600$", text)
    assert "Top kernels of rank 3, the slowest by its median" in text
    assert "warning     ranks 0 to 3: step 7 is cut off" in text, "the same warning is printed once"


def test_a_share_says_where_it_is_a_mean_over_the_ranks():
    analysis = analyze(TRACES / "slow_rank_gpu").analysis
    assert "Findings, shares averaged over the ranks" in printed(analysis)
    assert (
        f"2. [**compute-bound**]({docs_url('compute-bound')}) on rank 1, 46.2 % of the step, mean of the ranks ("
        in markdown(analysis)
    )
    assert f"1. [**straggler**]({docs_url('straggler')}) on rank 1, 37.7 % of the step (" in markdown(analysis), (
        "8.3 ms of each 22.0 ms step"
    )
    assert "mean of the ranks" not in printed(sample_analysis(1)) + markdown(sample_analysis(1))


def test_as_many_kernels_and_operators_as_asked_for():
    assert "Operators" not in printed(sample_analysis())
    text = printed(sample_analysis(), kernels=1, operators=1)
    assert "aten::mm" in text
    assert "aten::add_" not in text
    assert "sm90_xmma" in text
    assert "flash_fwd" not in text


def test_colours_only_on_a_terminal():
    assert "\x1b" not in printed(sample_analysis(2))
    text = io.StringIO()
    print_analysis(sample_analysis(2), Screen(text, width=80, wrap=True, colours=True))
    assert "\x1b[1" in text.getvalue()


def test_sentences_are_broken_on_a_terminal_alone_and_between_words():
    [whole] = [line for line in printed(sample_analysis(1)).splitlines() if line.startswith("compute ")]
    assert len(whole) > 80, "in a file, a line is a line"
    lines = printed(sample_analysis(1), terminal=True).splitlines()
    [first] = [number for number, line in enumerate(lines) if line.startswith("compute ")]
    assert f"{lines[first]} {lines[first + 1].strip()}" == whole
    assert lines[first + 1].startswith(" " * len("compute    ")), "beside its name"


@pytest.mark.parametrize("ranks", [1, 2])
def test_names_cannot_steer_the_terminal(ranks):
    text = printed(hostile(ranks), operators=5)
    assert CONTROLS.search(text) is None
    assert "evil" in text
    assert "[l](javascript:x)" in text, "square brackets are text, not markup"


def test_without_ranks_or_findings_there_is_still_a_verdict():
    verdict, text = decide([])
    run = made_evidence(
        steps=90,
        on_device=True,
        step_ms=Distribution(mean=10.0, p50=9.9, min=9.0, max=12.0),
        regions={"data": RunRegion(device_ms=1.0, host_ms=1.5), "forward": RunRegion(device_ms=9.0, host_ms=3.0)},
    )
    analysis = Analysis(source="version_0", verdict=verdict, verdict_text=text, findings=(), run=run)
    assert printed(analysis).startswith("verdict     Nothing stands out")
    assert "| forward | 90.0 % | 9.00 |" in markdown(analysis)
    assert "How to view" not in markdown(analysis), "there is no trace to view"


# --- Markdown --------------------------------------------------------------------------------------------------------


def test_markdown_has_breakdown_efficiency_kernels_findings_and_how_to_view():
    text = markdown(sample_analysis(2))
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings[0] == "# Profile of `runs/gpt/forge`"
    assert {"## Time breakdown", "## Communication", "## Efficiency", "## Findings", "## How to view"} <= set(headings)
    assert "**Verdict:** input-bound: the GPU waits 8.5 ms" in text
    assert "| 1 | 53.467 | 51.700 | 71.0 | 38.0 | 9.0 | 4.0 | 20.0 | 29.0 | 16.0 |" in text
    assert "| &emsp;attention | 3.743 | 7.0 % |" in text
    assert (
        "| `vectorized_layer_norm_kernel<BFloat16, float, false>` | normalization | 50 | 1.871 | 37.4 | 3.5 % |" in text
    )
    assert "| `allreduce` | `default_pg` | 3.0 | 497.8 |" in text
    assert "| .item() | `train.py:88` | yours | 12.0 |" in text
    linked = f"3. [**compute-bound**]({docs_url('compute-bound')})"
    assert f"{linked}, 38.0 % of the step, mean of the ranks (from the trace)" in text
    assert "Evidence: idle in the data loader: 8.53 ms per step; workers: none" in text
    assert "forge-profiling view --perfetto runs/gpt/forge/rank1.trace.json.gz" in text
    assert "tensorboard --logdir" in text


@pytest.mark.parametrize("analysis", [sample_analysis(), sample_analysis(2), hostile(), hostile(2)])
def test_every_row_of_every_table_has_as_many_cells_as_its_head(analysis):
    lines = markdown(analysis).splitlines()
    tables = [number for number, line in enumerate(lines) if line.startswith("|---")]
    assert len(tables) >= 7
    for number in tables:
        columns = lines[number].count("|")
        rows = list(takewhile(lambda line: line.startswith("|"), lines[number + 1 :]))
        assert rows
        for row in (lines[number - 1], *rows):
            # GitHub skips a backslash together with what it escapes; others look at one character before the pipe.
            assert len(re.findall(r"\\.|(\|)", row)) - len(re.findall(r"\\.", row)) == columns
            assert len(re.findall(r"(?<!\\)\|", row)) == columns


@pytest.mark.parametrize("ranks", [1, 2])
def test_names_add_no_markup_to_markdown(ranks):
    tame, wild = (
        markdown(analysis) for analysis in (replace(sample_analysis(ranks), differences=("x",)), hostile(ranks))
    )
    assert CONTROLS.search(wild) is None
    assert [token.type for token in rendered(wild)] == [token.type for token in rendered(tame)], "the same blocks"
    inline = [child for token in rendered(wild) for child in token.children or []]
    assert not {"html_inline", "image"} & {child.type for child in inline}
    links = {child.attrs["href"] for child in inline if child.type == "link_open"}
    assert links == {"https://ui.perfetto.dev", *(docs_url(finding.code) for finding in sample_analysis().findings)}
    strong = [after.content for child, after in pairwise(inline) if child.type == "strong_open"]
    assert not [text for text in strong if "evil" in text]
    assert "a" not in strong


@pytest.mark.parametrize(
    "name", ["a", "a|b", "`", "``x`", "a`b", " x ", "a\\|b", "a\\", "<b>|</b>", "|", "\x1b", "a\nb", "&lt;", "x" * 300]
)
def test_a_code_span_holds_its_text_in_a_table(name):
    tokens = rendered(f"| k | n |\n|---|---|\n| {code_cell(name)} | 1 |\n")
    first, second = [token for token in tokens if token.type == "inline"][2:]
    assert second.content == "1"
    assert [child.type for child in first.children] == ["code_inline"]
    # What is left out: a backslash before a pipe, controls, the outer spaces that a span may not keep.
    assert first.children[0].content.strip() == plain(name).replace("\\|", "|").strip()


@pytest.mark.parametrize(
    "text", ["a*b*c", "_x_", "num_workers=4", "<img src=x>", "[a](b)", "a|b", "~~s~~", "# t", "&amp;"]
)
def test_prose_is_shown_as_it_is(text):
    (_, inline, _) = rendered(f"x {prose(text)}")
    assert {child.type for child in inline.children} <= {"text", "text_special"}
    assert "".join(child.content for child in inline.children) == f"x {text}"


# --- what the numbers are over ---------------------------------------------------------------------------------------


def test_it_is_said_once_which_steps_the_figures_are_over():
    analysis = analyze(TRACES / "slow_optimizer").analysis
    assert "each 8.77 ms step" in analysis.verdict_text
    assert f"{analysis.ranks[0].step_ms.mean:.1f}" == "8.8"
    first = analysis.ranks[0].per_step[0].number
    note = f"all figures leave out step {first} (the first recorded step: an empty GPU queue"
    assert " ".join(printed(analysis).split()).count(note) == 1
    assert markdown(analysis).count(note) == 1


def test_findings_of_the_run_alone_are_without_no_step():
    analysis = replace(sample_analysis(), findings_note="findings are without the first recorded step")
    of_run = tuple(replace(finding, source="run") for finding in analysis.findings)
    for report, note in ((printed, "\nnote        "), (markdown, "Note: ")):
        assert f"{note}findings are without" in report(analysis)
        assert f"{note}findings" not in report(replace(analysis, findings=of_run))
        assert f"{note}findings" not in report(replace(analysis, findings=()))


def test_who_is_the_slowest_can_be_read_from_the_table_above():
    """Rank 0's first step is longer by far, for it waited there, and does not count."""
    analysis = analyze(TRACES / "slow_rank_gpu").analysis
    text = printed(analysis)
    assert analysis.ranks[0].per_step[0].ms > 2 * analysis.ranks[0].step_ms.max
    assert re.search(r"(?m)^0 +21\.986 ", text)
    assert re.search(r"(?m)^1 +21\.988 ", text)
    assert "Top kernels of rank 1, the slowest by its median" in text
    text = markdown(analysis)
    assert "| rank | step ms | median | busy % |" in text
    assert "| 0 | 21.986 | 21.986 | 94.5 |" in text
    assert "Rank 1, the slowest by its median, `rank1.trace.json.gz`" in text


@pytest.fixture
def cpu_trace(make_trainer, tmp_path):
    """What a fit on a CPU leaves."""
    make_trainer(ForgeProfilerCallback(start_step=3, end_step=5, trace_dir=tmp_path / "traces")).fit(
        Classifier(), loader(32)
    )
    [folder] = (tmp_path / "traces").iterdir()
    return folder


def ranks_of(analysis, count):
    """As many ranks as asked for, all of them like the first."""
    return replace(analysis, ranks=tuple(replace(analysis.ranks[0], rank=number) for number in range(count)))


IDLE_GPU = ("busy", "idle", "between launches", "unnamed device", "matmul")


@pytest.mark.parametrize(
    ("case", "remark"),
    [
        ("sync_item", "Tables count idle time inside the call alone; sync-bound, the whole gap that began in it."),
        ("ddp_comm_bound", "Tables count waiting for other ranks as communication; communication-bound does not."),
    ],
)
def test_where_tables_seem_to_contradict_the_findings_it_is_said_why(case, remark):
    analysis = analyze(TRACES / case).analysis
    for text in (printed(analysis), markdown(analysis), report_page(analysis, [])):
        assert remark in " ".join(text.split())


def test_a_trace_without_gpu_work_is_not_told_as_an_idle_gpu(cpu_trace):
    analysis = analyze(cpu_trace).analysis
    written = (cpu_trace / "summary.md").read_text(encoding="utf-8")
    for ranks in (analysis, ranks_of(analysis, 2)):
        for text in (written, markdown(ranks), printed(ranks)):
            assert "; no GPU events in the trace" in " ".join(text.split())
            assert not [word for word in IDLE_GPU if word in text]
            assert text.count("100.0 %") == 1, "the step itself"
            assert "forward" in text, "the host's times are there"
    assert "| part of the step | ms per step | of step |" in written
    assert re.search(r"(?m)^1 +\d+\.\d{3} +\d+\.\d{3}$", printed(ranks_of(analysis, 2)))


def test_of_ranks_with_and_without_gpu_work_only_the_former_are_busy_or_idle(cpu_trace):
    blind = replace(analyze(cpu_trace).analysis.ranks[0], rank=1)
    analysis = sample_analysis(2)
    mixed = replace(analysis, ranks=(analysis.ranks[0], blind))
    mean, median = f"{blind.step_ms.mean:.3f}", f"{blind.step_ms.p50:.3f}"
    assert re.search(rf"(?m)^1 +{mean} +{median} *$", printed(mixed))
    assert f"| 1 | {mean} | {median} |{'  |' * 12}" in markdown(mixed)


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\x1b[1;31mb\x1b[0mc", "abc"),
        ("a\x1b]8;;http://evil\x1b\\b\x1b]8;;\x07c", "abc"),
        ("a\x9b31mb\x9d0;t\x9cc", "abc"),
        ("a\x1bPq#0\x1b\\b", "ab"),
        ("\x00a\x07\x08\x7fb", "ab"),
        ("a\r\nb\tc\u2028d", "a  b c d"),
        ("a\u202eb\u2066c\u200bd\ufeff", "abcd"),
        ("\ud800x", "x"),
        ("café 内核 🙂", "café 内核 🙂"),
    ],
)
def test_plain_text_keeps_what_can_be_read_and_nothing_else(text, expected):
    assert plain(text) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (ADD, "elementwise_kernel: CUDAFunctor_add<BFloat16>"),
        (GEMM, GEMM),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)"),
        ("void cub::CUB_300::DeviceReduceKernel<int>(int*, (anonymous namespace)::T)", "DeviceReduceKernel<int>"),
        (
            "void at::elementwise_kernel<4, at::copy_kernel(at::Iterator&)::{lambda()#3}::operator()() const>(int)",
            "elementwise_kernel: copy_kernel",
        ),
        ("Cijk_Alik_Bljk_BBS_BH_Bias", "Cijk_Alik_Bljk_BBS_BH_Bias"),
        ("std::", "std::"),
        ("(((", "((("),
        ("", ""),
    ],
)
def test_kernels_are_called_what_people_call_them(name, expected):
    assert short_kernel_name(name, 200) == expected


def test_no_short_name_is_longer_than_asked_and_a_huge_one_takes_no_time():
    for width in (1, 2, 10, 60):
        assert len(short_kernel_name(ADD, width)) <= width
        assert len(short(GEMM, width)) <= width
    for huge in ("(" * 10**6, "a::" * 10**6, "a" * 10**6, "\x1b[" * 10**6, "(a)::{lambda(" * 10**5):
        assert len(short_kernel_name(huge, 60)) <= 60


# --- files -----------------------------------------------------------------------------------------------------------


def test_three_files_are_written_whole_and_replace_what_was_there(tmp_path):
    (tmp_path / "summary.md").write_text("old")
    paths = write_reports(sample_analysis(2), [], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "summary.json", "summary.md"]
    assert msgspec.json.decode(paths.summary_json.read_bytes(), type=Analysis) == sample_analysis(2)
    assert paths.summary_markdown.read_text(encoding="utf-8") == markdown(sample_analysis(2))
    assert paths.html.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_a_file_that_cannot_be_written_leaves_nothing_and_is_named(tmp_path):
    (tmp_path / "folder").mkdir()
    for target in (tmp_path / "none" / "report.md", tmp_path / "folder"):
        with pytest.raises(OSError, match=re.escape(str(target))) as caught:
            write_whole(target, b"x")
        assert caught.value.filename == str(target)
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


def test_writing_a_file_touches_no_other(tmp_path):
    """A name made of the file's own may be a user's too, and too long for a file."""
    other = tmp_path / "a.json.tmp"
    other.write_text("a user's")
    for name in ("a.json", "n" * 255):
        write_whole(tmp_path / name, b"x")
        assert (tmp_path / name).read_bytes() == b"x"
    assert other.read_text() == "a user's"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.json.tmp", "n" * 255]


def test_a_file_has_the_rights_that_any_new_file_has(tmp_path):
    (tmp_path / "plain").touch()
    write_whole(tmp_path / "a", b"x")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_summaries_are_valid_against_the_schema_and_others_are_not():
    schema = json.loads(schema_json())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for analysis in (sample_analysis(), sample_analysis(3), hostile()):
        summary = json.loads(summary_json(analysis))
        assert summary["schema_version"] == 2
        validator.validate(summary)
    for spoil in (
        lambda summary: summary.update(schema_version=3),
        lambda summary: summary.pop("verdict"),
        lambda summary: summary["ranks"][0]["gpu"].update(busy_pct="71 %"),
        lambda summary: summary["findings"][0].update(source="hearsay"),
    ):
        summary = json.loads(summary_json(sample_analysis()))
        spoil(summary)
        assert not validator.is_valid(summary)


@pytest.mark.parametrize("of_record", [False, True])
def test_the_schema_says_what_each_field_means(of_record):
    definitions = json.loads(schema_json(of_record=of_record))["$defs"]
    fields = {(kind, name): field for kind, each in definitions.items() for name, field in each["properties"].items()}
    assert [place for place, field in fields.items() if "description" not in field and place[1] != "line"] == []
    assert definitions["Flops"]["properties"]["counted_pct"]["description"].startswith("share of the time of matmul")
    assert "\n" not in definitions["RankSummary"]["properties"]["idle"]["description"]
    assert "Attributes" not in definitions["RankSummary"]["description"]


def test_the_share_of_gpu_time_without_a_launch_is_printed():
    said = "99.6 % of the GPU time is joined to its launch, 0.4 % is not"
    assert said in printed(sample_analysis())
    assert said in markdown(sample_analysis())
