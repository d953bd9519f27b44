"""Files that commands write: never a user's own trace, never one over the other, and with the mode they had."""

import gzip
import json
import os
import stat

import pytest

from lightning_forge_profiling.cli.main import main
from lightning_forge_profiling.report.page import write_reports
from lightning_forge_profiling.schema import Analysis

PAGE = "<!DOCTYPE html>"


def trace(path):
    events = [{"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 0, "dur": 1, "pid": 1, "tid": 1}]
    path.write_bytes(gzip.compress(json.dumps({"source": path.name, "traceEvents": events}).encode()))
    return path


def refused(capsys, *arguments):
    """The one line that says why a command has done nothing, with exit code 2."""
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    return line.removeprefix("forge-profiling: ")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["itself", "link", "hard link", "through a linked folder"])
def test_a_page_does_not_replace_its_trace(tmp_path, capsys, name):
    (tmp_path / "runs").mkdir()
    own = output = trace(tmp_path / "runs" / "rank0.trace.json.gz")
    if name == "link":
        (output := tmp_path / "report").symlink_to(own)
    elif name == "hard link":
        (output := tmp_path / "report").hardlink_to(own)
    elif name == "through a linked folder":
        (tmp_path / "latest").symlink_to(own.parent)
        output = tmp_path / "latest" / own.name
    before = contents(tmp_path)
    why = f"PATH and --save both name {own}: one would overwrite the other"
    assert refused(capsys, "view", own, "--save", output) == why
    assert contents(tmp_path) == before


def test_a_page_does_not_replace_a_trace_of_its_folder(tmp_path, capsys):
    traces = [trace(tmp_path / f"rank{rank}.trace.json.gz") for rank in range(2)]
    before = contents(tmp_path)
    assert f"both name {traces[1]}" in refused(capsys, "view", tmp_path, "--save", traces[1])
    assert contents(tmp_path) == before


def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path, capsys):
    source = trace(tmp_path / "rank0.trace.json.gz")
    for page, why in ((tmp_path / "none" / "r.html", "there is no folder"), (tmp_path, "is a folder")):
        assert why in refused(capsys, "view", source, "--save", page)


def test_tensorboard_does_not_replace_the_trace_of_another_copy(tmp_path, capsys):
    """Where the names do not tell the ranks apart, the copies are numbered, and a number may be another's name."""
    traces = [trace(tmp_path / name) for name in ("a_rank0.pt.trace.json.gz", "rank0.pt.trace.json.gz")]
    before = contents(tmp_path)
    assert f"{traces[1]}: the copy would replace the trace" in refused(
        capsys, "export", tmp_path, "--for", "tensorboard", "--out", tmp_path
    )
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rank0.pt.trace.json.gz").symlink_to(traces[1])
    assert "the copy would replace the trace" in refused(
        capsys, "export", traces[1], "--for", "tensorboard", "--out", tmp_path / "out"
    )
    assert contents(tmp_path) == {**before, tmp_path / "out" / "rank0.pt.trace.json.gz": before[traces[1]]}


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.linux
@pytest.mark.parametrize("kept", [0o600, 0o640, 0o666])
def test_a_report_keeps_the_mode_of_the_one_that_it_replaces(tmp_path, kept, capsys):
    source = trace(tmp_path / "rank0.trace.json.gz")
    reports = [tmp_path / name for name in ("r.html", "rank0.pt.trace.json.gz", "summary.json")]
    for report in reports:
        report.touch()
        report.chmod(kept)
    assert main(["view", str(source), "--save", str(reports[0])]) == 0
    assert main(["export", str(source), "--for", "tensorboard", "--out", str(tmp_path)]) == 0
    write_reports(Analysis(source="", verdict="", verdict_text="", findings=()), [], tmp_path)
    assert {report.name: mode(report) for report in reports} == {report.name: kept for report in reports}
    assert all(report.stat().st_size for report in reports)


@pytest.mark.parametrize("there", [True, False])
def test_a_report_is_written_through_a_link_of_the_users(tmp_path, there, capsys):
    source, link, target = trace(tmp_path / "t.trace.json.gz"), tmp_path / "link", tmp_path / "sub" / "report.html"
    target.parent.mkdir()
    link.symlink_to(target)
    if there:
        target.touch(mode=0o600)
    assert main(["view", str(source), "--save", str(link)]) == 0
    assert link.is_symlink()
    assert target.read_text(encoding="utf-8").startswith(PAGE)
    assert not there or mode(target) == 0o600
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a link that is another user's")
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_a_pipe_of_another_user_is_refused_where_all_can_write(tmp_path, kind, capsys):
    source, victim, shared = trace(tmp_path / "t.trace.json.gz"), tmp_path / "victim", tmp_path / "shared"
    victim.write_text("mine")
    shared.mkdir()
    shared.chmod(0o1777)
    output = shared / "report.html"
    if kind == "link":
        output.symlink_to(victim)
    else:
        os.mkfifo(output)
    os.lchown(output, 65534, 65534)
    os.chown(shared, 0, 0)
    assert "of another user" in refused(capsys, "view", source, "--save", output)
    assert victim.read_text() == "mine"
