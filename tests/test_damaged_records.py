"""Records with lines that cannot be read, of other runs, of newer versions, or too many: the rest is shown."""

import contextlib
import io
import json
import logging
import os
import random
import re
import subprocess
import sys
import time

import lightning as L
import pytest
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback, region
from lightning_forge_profiling.cli.main import main
from lightning_forge_profiling.record.files import decode_line, encode_line
from lightning_forge_profiling.record.reader import RecordError, read_run
from lightning_forge_profiling.schema import Begin, EventLine
from tests.models import Classifier, Fails, loader, quiet_trainer
from tests.outcomes import HANGS_S, script
from tests.record_builder import MadeRun
from tests.test_cli import fails, forge
from tests.test_record import the_record, wait_for

LONG_AGO = 1.7e9
RUN = MadeRun(rows=6, began=LONG_AGO, outcome="finished")
DEEP = b"[" * 2000


def changed(record, name, change):
    """Change the file of a rank; returns the record."""
    path = record / name
    path.write_bytes(change(path.read_bytes()))
    return record


def read_all(record, other):
    """Exit codes of all commands on a record, and what they wrote to standard error."""
    commands = (
        ["show", record],
        ["show", record, "--json"],
        ["watch", record, "--once"],
        ["view", record, "--save", other.parent / "run.html"],
        ["compare", other, record, "--anyway"],
        ["compare", record, other, "--anyway", "--format", "json", "--fail-over", "5"],
    )
    codes, errors = [], io.StringIO()
    for command in commands:
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            codes.append(main([str(part) for part in command]))
    return codes, errors.getvalue()


@pytest.fixture
def other(tmp_path):
    return MadeRun(rows=6, began=LONG_AGO, outcome="finished", run="other").write(tmp_path / "other")


# -- names that are too long -----------------------------------------------------------------------------------------


LONG = "y" * 100_000
READ = {".jsonl", ".html", ".json", ".md"}


@pytest.mark.slow
def test_names_are_cut_where_they_are_written(tmp_path, capsys):
    def named(kind):
        return type(f"A\u202e{LONG}", (kind,), {})

    class Waits(L.Callback):
        def on_train_batch_end(self, *_):
            time.sleep(0.003)

    class Model(Classifier):
        def training_step(self, batch):
            with region(f"B\u202e{LONG}"):
                return super().training_step(batch)

    trainer = quiet_trainer(
        named(Waits)(), ForgeProfilerCallback(4, 6), ThroughputCallback(warmup_steps=1), max_steps=20,
        logger=named(CSVLogger)(tmp_path), log_every_n_steps=1, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(named(Model)(), loader(100))
    printed = capsys.readouterr().out
    written = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*") if path.suffix in READ}
    assert {"rank0.jsonl", "report.html", "summary.json", "summary.md"} <= written.keys()
    for text in printed, *written.values():
        assert "y" * 200 not in text
        assert "\u202e" not in text
    assert f'"callback/A{"y" * 198}….on_train_batch_end"' in written["rank0.jsonl"]
    assert f'"B{"y" * 198}…"' in written["rank0.jsonl"]


@pytest.mark.parametrize("length", [300, 1_000_000])
def test_names_are_cut_where_they_are_shown(tmp_path, other, capsys, length):
    def rename(content):
        for name in b"node0", b"NVIDIA H200", b"startup/fit", b"validation", b"train.py":
            content = content.replace(name, "\u202e".encode() + b"h" * length, 2)
        return content

    record, page = changed(RUN.write(tmp_path), "rank0.jsonl", rename), tmp_path / "run.html"
    commands = ["show"], ["show", "--json"], ["watch", "--once"], ["view", "--save", str(page)]
    for command, *options in commands:
        assert main([command, str(record), *options]) == 0
    shown, embedded = capsys.readouterr().out, page.read_text(encoding="utf-8")
    for text in shown, embedded:
        assert "h" * 150 in text
        assert "h" * 200 not in text
        assert "\u202e" not in text
    assert len(embedded) < 300_000


# -- lines that cannot be read -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(rb'"name":"', b'"name":"\xff', id="no UTF-8"),
        pytest.param(rb'"logger_step":', b'"ignored":' + DEEP + b',"logger_step":', id="deep"),
        pytest.param(rb'"steps_us":{', b'"steps_us":{"36000":5,', id="bucket"),
        pytest.param(rb'"steps_us":{', b'"steps_us":{"-3":5,', id="negative bucket"),
        pytest.param(rb'"counted":\d+', b'"counted":-5', id="negative"),
        pytest.param(rb'"data":[\d.]+', b'"data":1e308', id="largest"),
        pytest.param(rb'"data":[\d.]+', b'"data":5e-324', id="smallest"),
        pytest.param(rb'"step":\d+', b'"step":' + b"9" * 400, id="long"),
        pytest.param(rb'"at":[\d.]+', b'"at":-1', id="before 1970"),
    ],
)
def test_a_bad_line_is_skipped_and_said_once(tmp_path, other, old, new):
    def damage(content):
        lines = content.split(b"\n")
        lines[2:5] = [re.sub(old, lambda _: new, line, count=1) for line in lines[2:5]]
        return b"\n".join(lines)

    record = changed(RUN.write(tmp_path), "rank0.jsonl", damage)
    number = sum(line != found for line, found in zip(RUN.lines()[1:], read_run(record).ranks[0].lines, strict=False))
    codes, errors = read_all(record, other)
    assert set(codes) <= {0, 3}, errors
    assert "Traceback" not in errors
    if number:
        said = re.findall(r"rank0\.jsonl: (\d) lines? cannot be read \(first: line (\d): ", errors)
        assert len(said) == 4  # show, show --json, watch, view
        assert set(said) <= {("1", "3"), ("2", "3"), ("3", "3"), ("2", "4"), ("1", "4"), ("1", "5")}


def test_names_that_are_nearly_a_record_s_are_ignored(tmp_path, other):
    record = RUN.write(tmp_path)
    for name in ("rank0.².jsonl", "rank٣.jsonl", "rank00.jsonl", "rank0.1.jsonl.tmp", "rank-1.jsonl", "rank0.01.jsonl"):
        (record / name).write_text("x")
    codes, errors = read_all(record, other)
    assert (set(codes) <= {0, 3}, errors) == (True, "")


@pytest.mark.slow
@pytest.mark.two_clocks  # damaged numbers are of none
def test_no_damage_makes_a_command_fail_with_a_traceback(tmp_path, other):
    dice = random.Random(0)  # noqa: S311
    run = MadeRun(ranks=2, rows=6, began=LONG_AGO, outcome="failed")
    whole = [b"".join(map(encode_line, run.lines(rank))) for rank in range(2)]
    record = run.write(tmp_path)
    until = time.monotonic() + 10
    for _ in range(300):
        for rank, content in enumerate(whole):
            damaged = (_other_bytes if dice.random() < 0.3 else _other_values)(content, dice)
            (record / f"rank{rank}.jsonl").write_bytes(damaged)
        codes, errors = read_all(record, other)
        assert set(codes) <= {0, 1, 2, 3}, errors
        if time.monotonic() > until:
            break


NUMBERS = ("0", "-1", "1", "1e308", "5e-324", "1e24", "1e-30", "1e15", "9" * 400, "0.5", "null", '"x"', "true", "[]")


def _other_values(content, dice):
    """Replace some numbers: anywhere, or all under one name."""
    lines = content.split(b"\n")
    for place, line in enumerate(lines):
        if dice.random() < 0.5:
            name = dice.choice(re.findall(rb'"(\w+)":-?[\d.]', line) or [b""])
            value = dice.choice(NUMBERS).encode()
            lines[place] = re.sub(b'"' + name + rb'":-?[\d.e+-]+', b'"' + name + b'":' + value, line)
    return b"\n".join(lines)


def _other_bytes(content, dice):
    place = dice.randrange(len(content))
    junk = dice.choice([b"[", DEEP, b"\xff", b"\n", b"e308", b"-", b"{", b"\0", b'"', b"\\ud800", b""])
    return content[:place] + junk + content[place + dice.choice([0, 1, 40]) :]


# -- versions, runs, ranks ---------------------------------------------------------------------------------------------


def test_a_record_of_a_newer_version_says_so(tmp_path):
    newer = changed(RUN.write(tmp_path), "rank0.jsonl", lambda content: content.replace(b'version":2', b'version":3'))
    for command in (["show"], ["watch", "--once"], ["view", "--save", tmp_path / "run.html"]):
        done = forge(command[0], newer, *command[1:])
        assert fails(done, "written by a newer version of forge-profiling (layout 3, this reads 2): upgrade")


def test_a_planted_rank_of_another_run_does_not_hide_the_run(tmp_path):
    record = MadeRun(ranks=2, rows=6, began=LONG_AGO, outcome="finished").write(tmp_path / "a")
    planted = MadeRun(ranks=8, rows=6, run="planted").write(tmp_path / "b")
    (planted / "rank7.jsonl").rename(record / "rank7.jsonl")
    found = read_run(record)
    assert [rank.begin.rank for rank in found.ranks] == [0, 1]
    assert {rank.begin.run for rank in found.ranks} == {"made-up"}
    assert found.problems == ("rank7.jsonl is of another run",)
    (record / "rank0.jsonl").unlink()
    (planted / "rank6.jsonl").rename(record / "rank6.jsonl")
    assert {rank.begin.run for rank in read_run(record).ranks} == {"planted"}, "most ranks"


def test_of_as_many_ranks_of_two_runs_the_newer_run_is_shown(tmp_path):
    older = MadeRun(ranks=2, rows=6, began=LONG_AGO, run="older").write(tmp_path / "a")
    newer = MadeRun(ranks=3, rows=6, began=LONG_AGO + 60, run="newer").write(tmp_path / "b")
    (newer / "rank2.jsonl").rename(older / "rank2.jsonl")
    (older / "rank0.jsonl").unlink()
    run = read_run(older)
    assert [(rank.begin.run, rank.begin.rank) for rank in run.ranks] == [("newer", 2)]
    assert run.problems == ("rank1.jsonl is of another run",)
    (newer / "rank1.jsonl").replace(older / "rank1.jsonl")
    (tmp_path / "c").mkdir()
    planted = MadeRun(rows=6, began=LONG_AGO, run="planted").write(tmp_path / "c")
    (planted / "rank0.jsonl").rename(older / "rank0.jsonl")
    assert {rank.begin.run for rank in read_run(older).ranks} == {"planted"}, "older and with fewer ranks, but rank 0's"


def test_ranks_that_the_run_does_not_have_are_left_out(tmp_path):
    record = MadeRun(ranks=2, rows=6, began=LONG_AGO).write(tmp_path / "a")
    wider = MadeRun(ranks=9, rows=6, began=LONG_AGO).write(tmp_path / "b")
    (wider / "rank8.jsonl").rename(record / "rank8.jsonl")  # of the same run
    (wider / "rank1.jsonl").rename(record / "rank5.jsonl")  # under another rank's name
    found = read_run(record)
    assert [rank.begin.rank for rank in found.ranks] == [0, 1]
    assert len(found.problems) == 2


@pytest.mark.slow
def test_totals_are_kept_of_one_rank_and_lines_of_the_others_are_few(tmp_path):
    record = MadeRun(ranks=3, rows=120, began=LONG_AGO, outcome="finished").write(tmp_path)
    first, *others = read_run(record).ranks
    assert len(first.intervals) == 120
    assert first.state is not None
    assert [(len(rank.intervals), rank.state) for rank in others] == [(50, None)] * 2
    [alone] = read_run(record, first_only=True).ranks
    assert alone == first
    (record / "rank0.jsonl").write_text("x")
    assert [rank.state is not None for rank in read_run(record, first_only=True).ranks] == [True, False]


# -- while it is written -----------------------------------------------------------------------------------------------

ROTATES = """
import sys
from pathlib import Path
from lightning_forge_profiling.schema import Begin, EventLine
from lightning_forge_profiling.record.writer import Segments
begin = Begin(run="a1", rank=0, world_size=1, at=0.0, versions={}, host="", device="cpu", settings={})
files, step = Segments(Path(sys.argv[1]), begin, segment_bytes=5000), 0
while True:
    files.append(EventLine(at=0.0, step=step, kind="epoch"))
    step += 1
"""


@pytest.mark.slow
def test_no_line_is_lost_while_files_rotate(tmp_path):
    folder = tmp_path / "forge_record"
    with subprocess.Popen([sys.executable, "-c", ROTATES, str(folder)]) as writer:
        try:
            reads, newest = 0, -1
            while reads < 300:
                assert writer.poll() is None, "it goes on until it is killed"
                try:
                    [rank] = read_run(folder).ranks
                except (RecordError, FileNotFoundError):  # none yet, or it says that it could not be read
                    continue
                steps = [event.step for event in rank.events]
                assert steps == list(range(steps[0], steps[-1] + 1))
                assert steps[-1] >= newest
                reads, newest = reads + 1, steps[-1]
        finally:
            writer.kill()


# -- text that is no Unicode -------------------------------------------------------------------------------------------


def test_a_failed_run_reads_failed_whatever_its_exception_says(tmp_path, make_trainer):
    with pytest.raises(ValueError, match="bad"):
        make_trainer(ThroughputCallback(warmup_steps=1)).fit(Fails(6, ValueError("bad \udcff")), loader(80))
    record = the_record(tmp_path)
    assert (record.end.outcome, record.end.exception) == ("failed", "ValueError: bad ?")
    assert [event.text for event in record.events] == ["ValueError: bad ?"]


@pytest.mark.slow
def test_a_record_that_others_cut_while_it_is_written_is_missing_on_the_page_and_no_more(tmp_path, caplog, capsys):
    def cut(trainer, module, outputs, batch, index):
        if index == 15:
            [path] = wait_for(lambda: list(tmp_path.rglob("rank0.jsonl")), time.monotonic() + HANGS_S)
            wait_for(lambda: path.stat().st_size, time.monotonic() + HANGS_S)
            os.truncate(path, 0)

    profiler = ForgeProfilerCallback(4, 6)
    cutting = LambdaCallback(on_train_batch_end=cut)
    quiet_trainer(profiler, ThroughputCallback(warmup_steps=1), cutting, default_root_dir=tmp_path).fit(
        Classifier(), loader(100)
    )
    said = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert not any("switched off" in each for each in said)
    [warning] = [each for each in said if "The page of the recorded steps does not show the run: " in each]
    assert warning.endswith("rank0.jsonl cannot be read as a record: it is empty")
    assert "Where a step of Classifier goes" in capsys.readouterr().out
    assert "input-bound" in profiler.trace_report().report_path.read_text(encoding="utf-8")


@pytest.mark.slow
def test_an_argument_that_is_not_utf_8_leaves_a_whole_record(tmp_path):
    done = script("recorded.py", tmp_path, "steps=20", "note=\udcff", cwd=tmp_path)
    assert done.returncode == 0
    assert the_record(tmp_path).end.outcome == "finished"


def test_what_is_no_unicode_is_replaced_wherever_it_is():
    begin = Begin(
        run="a", rank=0, world_size=1, at=1.5, versions={}, host="\ud800", device="cpu", settings={"\udcff": "\udcff"},
        argv=("\udcff.py",),
    )  # fmt: skip
    found = decode_line(encode_line(begin))
    assert (found.host, found.settings, found.argv, found.at) == ("?", {"?": "?"}, ("?.py",), 1.5)
    assert json.loads(encode_line(EventLine(at=0.0, step=0, kind="é"))) == json.loads(
        '{"line":"event","at":0.0,"set_s":0.0,"step":0,"kind":"é","text":"","seconds":0.0}'
    )
