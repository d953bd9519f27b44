"""Files of others where a run or a command looks: none is waited for, followed, or read without end."""

import os
import re
import resource
import threading
import time
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_forge_profiling import ThroughputCallback, analyze
from lightning_forge_profiling.cli.main import main
from lightning_forge_profiling.errors import TraceError
from lightning_forge_profiling.record.reader import read_run
from lightning_forge_profiling.record.writer import git_commit
from lightning_forge_profiling.run import run_record
from lightning_forge_profiling.safe_files import open_regular, read_regular
from tests.models import Classifier, loader
from tests.outcomes import script
from tests.record_builder import MadeRun
from tests.test_cli import INPUT_BOUND, forge
from tests.test_record import the_record, warnings

pytestmark = pytest.mark.linux  # pipes and devices, which Windows opens otherwise

NOBODY = 65534
HASH = "deadbeef" * 5
KINDS = ("pipe", "endless", "link", "folder", "huge")
LONG_AGO = 1.7e9

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file that is another user's")


def plant(path, kind):
    """Put what would hold up or fill a careless reader in the place of a file."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        target = path.with_name("elsewhere")
        target.write_text("{}\n")
        path.symlink_to(target)
    elif kind == "folder":
        path.mkdir()
    elif kind == "deep":
        path.write_text('{"line":"begin","x":' + "[" * 2000)
    else:
        with path.open("wb") as file:
            file.truncate(1 << 33)  # sparse: one line of 8 GB


def limited():
    """At most 2 GB for a process that needs a tenth of it."""
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))


# -- the function that opens -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_regular_file_of_a_bounded_size_is_read(tmp_path, kind):
    plant(tmp_path / "file", kind)
    with pytest.raises(OSError, match=r"is a link|not a regular file|is larger than 10 bytes") as raised:
        read_regular(tmp_path / "file", 10)
    assert raised.value.filename == str(tmp_path / "file")


@pytest.mark.linux
def test_a_file_that_has_no_size_is_read_to_its_end():
    assert read_regular(Path("/proc/self/status")).startswith(b"Name:")


@needs_root
def test_a_file_of_another_user_is_refused_where_its_owner_counts(tmp_path):
    path = tmp_path / "file"
    path.write_text("x")
    os.chown(path, NOBODY, NOBODY)
    assert read_regular(path) == b"x"
    with pytest.raises(OSError, match="belongs to another user"):
        open_regular(path, owners={0})


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_training_does_not_wait_for_git(tmp_path):
    plant(tmp_path / ".git" / "HEAD", "pipe")
    user = tmp_path / "user"
    user.mkdir()
    done = script("recorded.py", user, "steps=20", cwd=user)
    assert done.returncode == 0
    record = the_record(user)
    assert (record.end.outcome, record.begin.commit) == ("finished", "")


@pytest.mark.slow
@pytest.mark.parametrize("name", [".git", ".git/HEAD", ".git/commondir", ".git/packed-refs", ".git/refs/heads/main"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_file_of_git_is_waited_for(tmp_path, kind, name):
    if name != ".git":
        repository(tmp_path)
    plant(tmp_path / name, kind)
    assert git_commit(tmp_path) in {"", HASH}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", [*KINDS, "deep"])
def test_resuming_does_not_wait_for_a_record_beside_the_checkpoint(tmp_path, make_trainer, kind):
    saves = ModelCheckpoint(dirpath=tmp_path / "ckpt", filename="last")
    make_trainer(saves, enable_checkpointing=True, logger=False).fit(Classifier(), loader(16))
    plant(tmp_path / "ckpt" / "forge_record" / "rank0.jsonl", kind)
    trainer = make_trainer(ThroughputCallback(warmup_steps=1), max_epochs=2, logger=False)
    trainer.fit(Classifier(), loader(16), ckpt_path=saves.best_model_path)
    [record] = read_run(tmp_path / "forge_record").ranks
    assert record.end.outcome == "finished"
    assert record.begin.continues == ""


@pytest.mark.slow
def test_training_goes_on_while_the_disk_with_git_hangs(tmp_path, make_trainer, monkeypatch, caplog):
    released = threading.Event()
    monkeypatch.setattr(run_record, "git_commit", lambda _: released.wait(60) or "")
    try:
        began = time.monotonic()
        make_trainer(ThroughputCallback(warmup_steps=1)).fit(Classifier(), loader(80))
        assert time.monotonic() - began < 30
        assert "The disk takes long to write the run's record" in " ".join(warnings(caplog))
    finally:
        released.set()


# -- the commit --------------------------------------------------------------------------------------------------------


def repository(folder, ref="refs/heads/main", value=HASH):
    (folder / ".git" / ref).parent.mkdir(parents=True)
    (folder / ".git" / "HEAD").write_text(f"ref: {ref}\n")
    (folder / ".git" / ref).write_text(f"{value}\n")
    return folder / ".git"


def test_a_branch_is_read_and_nothing_that_is_no_hash(tmp_path):
    repository(tmp_path / "good")
    assert git_commit(tmp_path / "good") == HASH
    repository(tmp_path / "short", value=HASH[:39])
    assert git_commit(tmp_path / "short") == ""


@pytest.mark.parametrize("head", ["ref: {}", "ref: refs/../../{}", "ref: refs/heads/out/token", "ref: refs/heads/link"])
def test_a_private_file_is_not_read_as_a_branch(tmp_path, head):
    token = tmp_path / "token"
    token.write_text(HASH)
    git = repository(tmp_path)
    (git / "refs" / "heads" / "out").symlink_to(tmp_path)
    (git / "refs" / "heads" / "link").symlink_to(token)
    (git / "HEAD").write_text(head.format(token if head == "ref: {}" else "token"))
    assert git_commit(tmp_path) == ""


@needs_root
@pytest.mark.parametrize("theirs", [".git", ".git/HEAD", ".git/refs/heads/main"])
def test_a_repository_of_another_user_does_not_count(tmp_path, theirs):
    repository(tmp_path)
    os.chown(tmp_path / theirs, NOBODY, NOBODY)
    assert git_commit(tmp_path) == ""


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("command", ["show", "watch", "view", "compare"])
def test_bad_rank_files_are_said_in_one_line_and_the_others_are_read(tmp_path, command):
    record = MadeRun(ranks=7, rows=6, began=LONG_AGO, outcome="finished").write(tmp_path / "run")
    good = MadeRun(rows=6, began=LONG_AGO, outcome="finished", run="before").write(tmp_path / "before")
    for rank, kind in enumerate(KINDS, 1):
        plant(record / f"rank{rank}.jsonl", kind)
    options = {
        "show": [record],
        "watch": [record, "--once"],
        "view": [record, "--save", tmp_path / "run.html"],
        "compare": [good, record, "--anyway"],
    }[command]
    done = forge(command, *options, preexec_fn=limited)
    assert done.returncode == 0, done.stderr
    if command != "compare":  # which reads rank 0's
        [line] = done.stderr.splitlines()
        assert [f"rank{rank}.jsonl cannot be read" in line for rank in range(7)] == [False, *[True] * 5, False]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", ["show", "watch", "view", "compare"])
def test_where_no_file_can_be_read_the_reason_is_said(tmp_path, command, kind, capsys):
    record = MadeRun(rows=1).write(tmp_path)
    plant(record / "rank0.jsonl", kind)
    options = {"view": ["--save", tmp_path / "x.html"], "compare": [record], "watch": ["--once"]}.get(command, [])
    for path in (record, record / "rank0.jsonl"):
        assert main([command, str(path), *map(str, options)]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert re.search("rank0.jsonl (cannot be read|has none)|no (record of a run|trace) in|is not a record", line)


def test_a_link_that_the_user_names_is_followed(tmp_path):
    record = MadeRun(rows=6, began=LONG_AGO, outcome="finished").write(tmp_path / "run")
    (tmp_path / "rank0.jsonl").symlink_to(record / "rank0.jsonl")
    assert forge("show", tmp_path / "rank0.jsonl").returncode == 0
    [trace] = INPUT_BOUND.glob("*.gz") if INPUT_BOUND.is_dir() else [INPUT_BOUND]
    (tmp_path / "mine.trace.json.gz").symlink_to(trace)
    assert analyze(tmp_path / "mine.trace.json.gz").analysis.ranks


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_trace_in_a_folder_that_is_no_file_is_left_out(tmp_path, kind):
    plant(tmp_path / "rank0.trace.json", kind)
    with pytest.raises(TraceError, match="no trace in this folder"):
        analyze(tmp_path)


@pytest.mark.slow
def test_a_summary_beside_the_traces_that_is_no_file_is_said(tmp_path):
    [trace] = INPUT_BOUND.glob("*.gz") if INPUT_BOUND.is_dir() else [INPUT_BOUND]
    (tmp_path / trace.name).write_bytes(trace.read_bytes())
    for content, complaint in ((b'{"schema_version":3}', "newer version"), (b"[" * 5000, "cannot be read")):
        (tmp_path / "summary.json").write_bytes(content)
        done = forge("show", tmp_path, "--json")
        assert done.returncode == 0
        assert complaint in done.stdout
