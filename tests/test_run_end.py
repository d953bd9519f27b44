"""What is printed at the end of a fit: 15 lines of 80 columns, the verdict and what to do about it last."""

import io
import re
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger
from msgspec.structs import replace

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.cli.main import main
from lightning_forge_profiling.diagnosis.machine_rules import STARVED
from lightning_forge_profiling.report.screen import Screen
from lightning_forge_profiling.report.terminal import print_end
from lightning_forge_profiling.run.compute_rate import compute_of, peak_of
from lightning_forge_profiling.schema import (
    Distribution,
    RunEvidence,
    RunLedger,
    RunMachine,
    RunReport,
    Saving,
    TraceReport,
)
from lightning_forge_profiling.timing.run_totals import RunTotals
from lightning_forge_profiling.timing.steps import StepTimes, StepWork
from tests.evidence import made_evidence
from tests.models import Classifier, loader
from tests.samples import sample_analysis

STEP = {"data": 12.0, "transfer": 0.1, "forward": 11.0, "backward": 20.0, "optimizer": 5.0, "other": 1.4}
LEDGER = RunLedger(
    wall_s=20.0,
    parts={"startup/imports": 9.0, "steps": 7.4, "checkpoint": 1.1, "profiler": 2.5},
    unexplained_s=0.0,
    counts={},
    goodput=7.4 / 8.5,
)


def report_of(analysis, *, steps=60, regions=STEP, users=(), **options):
    totals = RunTotals()
    for step in range(steps):
        times = {**regions, **dict.fromkeys(users, 3.0)}
        totals.add(StepTimes(step, times, times), StepWork(32.0, None, 1), "warm-up" if step < 6 else None)
    run = totals.timing(steps=steps, before_first_s=0.5, wall_s=2.4)
    device = {"device": "cuda:0 (NVIDIA H200)", "replicas": 1, "log_folder": None, "model": "GPT"}
    measured = replace((analysis and analysis.run) or RunEvidence(timing=run), timing=run)
    measured = replace(measured, machine=RunMachine(compute=options.pop("compute", ())))
    return RunReport(measured, options.pop("trace", None), analysis=analysis, **{**device, **options})


def evidence(ledger=LEDGER):
    times = Distribution(mean=49.5, p50=49.5, min=49.0, max=50.0)
    return made_evidence(steps=54, on_device=True, step_ms=times, regions={}, ledger=ledger)


def analysed(**changes):
    """An analysis whose verdict is its first finding, changed."""
    analysis = replace(sample_analysis(), run=evidence())
    first = replace(analysis.findings[0], **changes)
    text = f"{first.code}: {first.title}. {first.remedy}"
    return replace(analysis, findings=(first, *analysis.findings[1:]), verdict=first.code, verdict_text=text)


INPUT_BOUND = {
    "code": "input-bound",
    "title": "the GPU waits 12.0 ms of each 49.5 ms step for the data loader (host wait 25.0 ms, 13.0 ms of it hidden)",
    "fix": "DataLoader(..., num_workers=4)",
    "share_pct": 24.0,
    "low_pct": 22.0,
    "high_pct": 26.0,
    "saves": Saving(ms_per_step=12.0, pct=24.0, at_most=False, text="That saves about 12.0 ms a step (24 %)."),
}


def printed(report, files=None, width=80):
    text = io.StringIO()
    print_end(report, files, Screen(text, width=width, wrap=True, colours=False))
    return text.getvalue()


def test_the_sixteen_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mfu = compute_of("mfu", 400, peak_of("H200 SXM", "bf16", 989.5, "data sheet"))
    report = report_of(analysed(**INPUT_BOUND), compute=(mfu,))
    assert printed(report, tmp_path / "lightning_logs" / "version_0" / "forge_record").splitlines() == [
        "",
        "Where a step of GPT goes: 49.5 ms (p95 49.5), 54 of 60 steps on NVIDIA H200",
        "                          share   mean ms",
        "data        █████▉       24.2 %     12.00",
        "forward     █████▍       22.2 %     11.00",
        "backward    █████████▊   40.4 %     20.00",
        "optimizer   ██▍          10.1 %      5.00",
        "rest        ▊             3.0 %      1.50",
        "throughput  646 samples/s, 20.2 steps/s, MFU 40.4 %",
        "goodput     87 % of the fit was training",
        "",
        "verdict     input-bound: the GPU waits 12.0 ms of each 49.5 ms step for the data",
        "            loader (host wait 25.0 ms, 13.0 ms of it hidden).",
        "try         DataLoader(..., num_workers=4)",
        "saves       about 12.0 ms a step (24 %)",
        "more        forge-profiling view lightning_logs/version_0/forge_record",
    ]


@pytest.mark.parametrize("advice", ["Do less.", "Do much less of it. " * 30], ids=["short", "long"])
@pytest.mark.parametrize("title", ["it waits", "training waits for what takes long " * 12], ids=["short", "long"])
@pytest.mark.parametrize("users", [(), ("attention", "loss", "augment")], ids=["built-in", "users"])
def test_it_is_never_longer_or_wider_than_what_to_try_needs(title, advice, users):
    analysis = analysed(title=title.strip(), advice=advice.strip(), fix="")
    report = report_of(analysis, users=users, device="cuda:0 (NVIDIA RTX PRO 6000 Blackwell Server Edition)")
    for width in (80, 200):
        lines = printed(report, width=width).splitlines()
        assert " ".join(line.strip() for line in lines).count(advice.split()[-1]) == advice.count(advice.split()[-1])
        assert len(lines) - len(advice) // 60 <= 19, "what to try is never cut"
        assert max(map(len, lines)) <= 80
        assert sum("%   " in line for line in lines) >= 4, "where the step goes"
        assert any(line.startswith("your attention") for line in lines) is bool(users)


def test_the_shares_of_the_built_in_regions_sum_to_the_step():
    for users in ((), ("mine",)):
        shown = printed(report_of(analysed(**INPUT_BOUND), users=users))
        shares = re.findall(r"^(?!your)\w+ +[█-▏]* +([\d.]+) % +[\d.]+$", shown, re.MULTILINE)
        assert sum(map(float, shares)) == pytest.approx(100, abs=0.3)


def test_beside_a_verdict_of_the_machine_the_rest_is_listed_as_unreliable():
    text = printed(report_of(analysed(code=STARVED)))
    assert re.search(r"^also +unreliable: sync-bound 5 %, compute-bound 38 %", text, re.MULTILINE)
    assert "\nalso" not in printed(report_of(analysed(**INPUT_BOUND)))


def test_a_larger_cause_below_a_verdict_of_the_machine_has_its_line_and_its_fix():
    analysis = analysed(code=STARVED, share_pct=30.0)
    cause = replace(
        analysis.findings[1], code="slow-call", share_pct=60.0, title="6 ms in f() at a.py:3", fix="", advice="Once."
    )
    text = printed(report_of(replace(analysis, findings=(analysis.findings[0], cause))))
    assert "\nthen        slow-call: 6 ms in f() at a.py:3: Once.\n" in text
    smaller = replace(cause, share_pct=20.0)
    assert "\nthen" not in printed(report_of(replace(analysis, findings=(analysis.findings[0], smaller))))


def test_the_region_that_a_finding_names_has_a_row():
    times = {"data": 4.0, "transfer": 8.0, "forward": 12.0, "backward": 12.0, "optimizer": 9.0, "other": 9.0}

    def shown(**changes):
        many_lines = {**INPUT_BOUND, "fix": "", "advice": "Load fewer samples. " * 20}
        text = printed(report_of(analysed(**{**many_lines, **changes}), regions=times))
        return re.findall(r"^(\w+) +[█-▏]+ ", text, re.MULTILINE)

    assert "data" in shown()
    assert "data" not in shown(code="slow-logger")


def test_what_the_machine_does_is_said_beside_another_verdict():
    analysis = analysed(**INPUT_BOUND)
    waits = replace(analysis.findings[1], code=STARVED, title="training waits 6.0 ms of each 49.5 ms step for a core")
    text = printed(report_of(replace(analysis, findings=(analysis.findings[0], waits))))
    assert "\nalso        cpu-starved: training waits 6.0 ms of each 49.5 ms step for a core.\n" in text


@pytest.mark.parametrize(("steps", "said"), [(8, True), (11, False)])
def test_a_verdict_of_the_recorded_steps_says_so_where_too_few_others_count(steps, said):
    text = " ".join(printed(report_of(analysed(**INPUT_BOUND, source="trace"), steps=steps)).split())
    assert ("the verdict is about the recorded steps: 2 other steady steps, at least 5 needed" in text) == said


def test_without_a_finding_the_verdict_stands_alone():
    analysis = replace(
        sample_analysis(), findings=(), verdict="nothing stands out", verdict_text="Nothing stands out: x"
    )
    text = printed(report_of(analysis))
    assert "verdict     Nothing stands out: x\n" in text
    assert "try  " not in text
    assert "saves" not in text


def test_what_is_missing_is_said(tmp_path):
    text = printed(report_of(None, steps=9, trace=TraceReport("not reached", "because of [brackets]")))
    assert "no trace    not reached: because of [brackets]\n" in text
    assert "verdict     not enough steps: 3 after warm-up, at least 5 needed\n" in text
    assert printed(report_of(None, steps=0)).startswith("\nWhere a step of GPT goes: unknown, no step was timed\n")
    copied = TraceReport("written", path=tmp_path / "a", url="s3://bucket/run")
    assert "copied to   s3://bucket/run\n" in printed(report_of(None, trace=copied))


def test_names_cannot_reach_the_terminal():
    text = printed(report_of(analysed(**{**INPUT_BOUND, "title": "x\x1b[2Jgone [red]no markup[/red]"})))
    assert "\x1b" not in text
    assert "[red]no markup[/red]" in text


@pytest.mark.parametrize("callbacks", [(ForgeProfilerCallback,), (ThroughputCallback,)])
def test_the_last_line_is_a_command_for_what_the_fit_left(tmp_path, make_trainer, capsys, callbacks):
    make_trainer(*(kind() for kind in callbacks), max_steps=20, max_epochs=-1).fit(Classifier(), loader(128))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("more        forge-profiling view ")
    folder = Path(last.removeprefix("more        forge-profiling view "))
    assert folder == tmp_path / "csv" / "version_0"
    assert main(["view", str(folder), "--no-browser"]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert "Classifier" in page.read_text() or callbacks == (ForgeProfilerCallback,)


@pytest.mark.slow
@pytest.mark.parametrize("window", [True, False])
def test_a_further_fit_in_the_same_folder_is_named_by_itself(tmp_path, make_trainer, capsys, window):
    for _ in range(2):
        callbacks = [ThroughputCallback(), *([ForgeProfilerCallback(2, 4)] if window else [])]
        logger = CSVLogger(tmp_path, "csv", version=0)
        make_trainer(*callbacks, logger=logger, max_steps=20, max_epochs=-1).fit(Classifier(), loader(128))
    last = capsys.readouterr().out.splitlines()[-1]
    [folder] = tmp_path.rglob("forge_record.2")
    left = callbacks[1].trace_report().path.parent if window else folder
    assert last == f"more        forge-profiling view {left}"
