"""Numbers and short sentences of the reports."""

import pytest
from msgspec.structs import replace

from lightning_forge_profiling.kernel_name import short, short_kernel_name
from lightning_forge_profiling.report.live_view import sparkline
from lightning_forge_profiling.report.markdown import code, code_cell, prose
from lightning_forge_profiling.report.run_status import duration
from lightning_forge_profiling.report.run_wording import (
    goodput_words,
    slowest_line,
    telemetry_words,
    window_effect_words,
)
from lightning_forge_profiling.report.wording import by_text, calls, digits, evidence
from lightning_forge_profiling.schema import (
    Distribution,
    Finding,
    RunLedger,
    RunTiming,
    SlowStep,
    TelemetrySummary,
    WindowEffect,
)
from lightning_forge_profiling.timing.ledger import goodput
from tests.evidence import made_evidence


@pytest.mark.parametrize(
    ("say", "value", "expected"),
    [
        (digits, 1234.5, "1,234"),
        (digits, 0.01234, "0.0123"),
        (digits, 0.0, "0"),
        (calls, 3.0, "3"),
        (calls, 1 / 3, "0.33"),
        (calls, 12.5, "12.5"),
        (calls, 1 / 400, "0.0025"),
        (duration, 3.4, "3 s"),
        (duration, 840, "14 min"),
        (duration, 7380, "2 h 3 min"),
        (duration, 266_400, "3 d 2 h"),
        (code, "vector<int> a|b", "`vector<int> a|b`"),
        (code, "a`b", "``a`b``"),
        (code_cell, "vector<int> a|b", "`vector<int> a\\|b`"),
        (prose, "set num_workers | <b>*4*</b>", "set num_workers \\| &lt;b&gt;\\*4\\*&lt;/b&gt;"),
        (prose, "ask @octocat, see GH-12", "ask `@octocat`, see `GH-12`"),
        (
            short_kernel_name,
            "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float> >(int)",
            "elementwise_kernel: AddFunctor<float>",
        ),
        (
            short_kernel_name,
            "cutlass::device_kernel<CollectiveMma<cute::tuple<cute::C<128>, cute::C<64> > > >",
            "device_kernel<CollectiveMma<128x64>>",
        ),
    ],
)
def test_numbers_and_names_as_they_are_shown(say, value, expected):
    assert say(value) == expected


def test_a_name_that_is_cut_off_loses_a_number_whole():
    assert short("aten::convolution_backward", 12) == "aten::convo…"
    assert short("gemm_256x128", 11) == "gemm_256x…"
    assert short_kernel_name("Memcpy HtoD (Pageable -> Device)", width=12) == "Memcpy HtoD…"


def test_a_message_of_several_ranks_appears_once():
    messages = [(0, "no shapes"), (1, "no stacks"), (2, "no shapes")]
    assert [*by_text(messages, several=True)] == [("ranks 0, 2: ", "no shapes"), ("rank 1: ", "no stacks")]


def test_the_pace_after_a_window_against_that_before_it():
    effect = WindowEffect(
        steps_before=40, steps_after=90, before_ms=5.2, after_ms=5.3, change_pct=1.9, low_pct=-1.0, high_pct=4.0
    )
    expected = "the median step takes 5.30 ms after the window, 5.20 ms before it: +1.9 % (95 %: -1.0 to +4.0 %)"
    assert window_effect_words(effect) == expected


def test_goodput_is_of_the_fit_without_profiling():
    parts = {"startup/imports": 2.5, "steps": 7.2, "validation": 0.3}
    ledger = RunLedger(wall_s=10.0, parts=parts, unexplained_s=0.0, counts={})
    with_ours = replace(ledger, wall_s=12.8, parts={**parts, "profiler": 2.8})
    assert [goodput(each, RunTiming()) for each in (ledger, with_ours)] == pytest.approx([0.96, 0.96])
    assert goodput_words(replace(ledger, goodput=0.96)) == "96 % of the fit was training"
    assert goodput_words(ledger) == ""


def test_readings_that_are_missing_are_left_out():
    gpu = TelemetrySummary(device="NVIDIA H200", utilization_pct=93.2, throttled_pct=0.0)
    assert ", ".join(telemetry_words(gpu)) == "93 % utilized, not throttled"


def test_a_slow_step_is_named_with_what_took_long():
    steps = Distribution(mean=91.0, p50=90.0, min=88.0, max=812.0)
    slow = SlowStep(step=1200, ms=812.0, parts_ms={"callback/EMA.on_train_batch_end": 640.0})
    run = made_evidence(steps=2000, on_device=True, step_ms=steps, regions={}, slowest=(slow,))
    expected = "step 1200: 812 ms, 640 of it callback/EMA.on_train_batch_end (median 90.0 ms)"
    assert slowest_line(run) == expected


def test_a_sparkline_has_eight_heights():
    assert sparkline([36.0, 36.1, 36.0, 41.5, 36.2], width=60) == "▁▁▁█▁"


def test_evidence_has_its_unit_and_its_meaning_and_no_two_figures_one_name():
    figures = {
        "exposed_wait_ms_per_step": 18.49, "host_wait_ms_per_step": 18.49, "num_workers": 0,
        "persistent_workers": False, "copied_bytes_per_step": 226e6, "seconds": 2.0, "line": "train.py:8 load",
        "line_pct": 96.44, "operator": "",
    }  # fmt: skip
    found = Finding(
        code="input-bound", share_pct=9.0, rank=None, title="", evidence=figures, advice="", source="run"
    )  # fmt: skip
    shown = {name: value for name, value, _ in evidence(found)}
    assert shown == {
        "exposed wait": "18.5 ms per step", "num workers": "0", "persistent workers": "False",
        "copied": "226 MB per step", "takes": "2 s", "line": "train.py:8 load", "of it in that line": "96.4 %",
    }  # fmt: skip
    means = {name: text for name, _, text in evidence(found)}
    assert means["num workers"] == "number of worker processes", "as the schema says"
    on_gpu = replace(found, evidence={**figures, "exposed_wait_ms_per_step": 12.1})
    assert [name for name, _, _ in evidence(on_gpu)][:2] == ["exposed wait", "host wait"]
