"""`forge-profiling try`: which changes there are, which are kept, and what is said. `test_try_command.py` starts it."""

import ast
from dataclasses import replace as changed
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from lightning_forge_profiling.cli.main import main
from lightning_forge_profiling.cli.shared import CHANGES, duration
from lightning_forge_profiling.comparison.source import Source
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.schema import (
    Analysis,
    Conditions,
    Finding,
    Ratio,
    Saving,
    TrialFacts,
    TrialLoader,
    TriedChange,
    TryResult,
)
from lightning_forge_profiling.timing.bootstrap import Estimate
from lightning_forge_profiling.trial.ablated import without_call
from lightning_forge_profiling.trial.changes import GROUPS, ROWS, Change, Row, build, by_hand, candidates
from lightning_forge_profiling.trial.changes import Built as Set
from lightning_forge_profiling.trial.processes import Measured, validation_ms, with_validation
from lightning_forge_profiling.trial.report import github, known_before, last_lines, predictions, short, tried_line
from lightning_forge_profiling.trial.search import Search, TrialError, same_training

LOSSES = (1.0, 0.5, 0.25)
PLAIN = TrialFacts(
    trainer="/train.py:9",
    fit="/train.py:10",
    cores=4,
    losses=LOSSES,
    settings={"precision": "32-true", "detect_anomaly": False, "matmul_precision": "highest"},
    loaders=(TrialLoader(place="/data.py:31"),),
    optimizers=("AdamW takes-fused takes-foreach",),
)


def finding(code, share=50.0, **fields):
    return Finding(
        **{
            "code": code,
            "share_pct": share,
            "rank": None,
            "source": "run",
            "title": code,
            "evidence": {},
            "advice": "do it",
        }
        | fields
    )


def analysis(*findings):
    return Analysis(source="", verdict=findings[0].code if findings else "", verdict_text="", findings=findings)


# --- the changes ------------------------------------------------------------------------------------------------------


def names(*findings, facts=PLAIN, **options):
    built = (build(row, facts, cause) for row, cause in candidates(analysis(*findings), **options))
    return [*dict.fromkeys(change.name for change in built if change is not None)]


def row(name):
    return next(row for row in ROWS if row.name == name)


def spec(name, facts=PLAIN, cause=None):
    change = build(row(name), facts, cause)
    return None if change is None else change.spec


def test_the_changes_of_findings_come_in_the_order_of_these():
    slow, waits = finding("slow-optimizer"), finding("input-bound")
    assert names(waits, slow) == ["workers", "fused", "foreach"]
    assert names(slow, waits) == ["fused", "foreach", "workers"]
    assert names(finding("startup-bound")) == []


def test_a_row_that_does_not_apply_for_one_finding_is_built_for_the_next():
    assert names(finding("validation-bound"), finding("input-bound")) == ["workers"]


def test_all_and_only_take_changes_without_a_finding():
    assert names(finding("slow-optimizer"), only=["workers"]) == ["workers"]
    assert names(finding("startup-bound"), everything=True) == ["workers", "compile", "fused", "foreach"]
    assert set(CHANGES) == {*GROUPS}


def test_as_many_workers_are_tried_as_the_finding_says():
    said = finding("input-bound", evidence={"try_num_workers": 6})
    assert spec("workers", cause=said)["loader"]["set"] == {"num_workers": 6, "persistent_workers": True}
    assert spec("workers")["loader"] == {
        "set": {"num_workers": 4, "persistent_workers": True},
        "places": ["/data.py:31"],
    }
    one = finding("input-bound", evidence={"try_num_workers": 1})
    assert spec("workers", cause=one)["loader"]["set"]["num_workers"] == 1
    on_gpu = replace(PLAIN, device="cuda", cores=16)
    assert spec("workers", on_gpu)["loader"]["set"]["pin_memory"] is True
    few = finding("input-bound", evidence={"try_num_workers": 2})
    assert spec("workers", on_gpu, few)["loader"]["set"]["num_workers"] == 8, "steps are to become shorter"


@pytest.mark.parametrize("name", ["persistent", "no-workers", "more-workers"])
def test_without_workers_nothing_is_set_that_needs_them(name):
    assert spec(name) is None


def test_workers_that_are_there_are_kept_between_epochs_or_left_out():
    facts = replace(PLAIN, loaders=(TrialLoader(place="/data.py:31", num_workers=2),))
    assert spec("workers", facts) is None
    assert spec("persistent", facts)["loader"]["set"] == {"persistent_workers": True}
    assert spec("no-workers", facts)["loader"]["set"] == {"num_workers": 0}
    assert spec("more-workers", facts)["loader"]["set"]["num_workers"] == 4
    four = replace(facts, loaders=(TrialLoader(place="/data.py:31", num_workers=4),))
    assert spec("more-workers", four, finding("input-bound", evidence={"try_num_workers": 5})) is None
    ours = replace(PLAIN, loaders=(TrialLoader(place="/data.py:31", num_workers=2, changed=True),))
    assert spec("no-workers", ours) is None
    none = replace(PLAIN, loaders=(TrialLoader(place="/data.py:31", num_workers=0, changed=True),))
    assert spec("workers", none) is None, "they were left out, which is kept"


def test_a_loader_that_must_keep_its_workers_is_left_as_it_is():
    fixed = replace(PLAIN, loaders=(TrialLoader(place="/data.py:31", fixed="an IterableDataset"),))
    assert spec("workers", fixed) is None


def test_for_validation_its_loader_is_changed_and_no_other():
    both = (TrialLoader(place="/data.py:31"), TrialLoader(place="/data.py:40", validates=True))
    facts = replace(PLAIN, loaders=both)
    assert build(row("workers"), facts, finding("validation-bound")).places == ("/data.py:40",)
    assert build(row("workers"), facts, finding("input-bound")).places == ("/data.py:31",)


@pytest.mark.parametrize(
    ("name", "facts", "set_to"),
    [
        ("anomaly", {"settings": {"detect_anomaly": True}}, {"trainer": {"detect_anomaly": False}}),
        ("precision", {"bf16": True}, {"trainer": {"precision": "bf16-mixed"}}),
        ("matmul", {"device": "cuda"}, {"module": {"matmul_precision": "high"}}),
        ("channels-last", {"device": "cuda", "has": ("conv2d",)}, {"module": {"channels_last": True}}),
        ("compile", {}, {"module": {"compile": {}}}),
        ("compile-child", {"child": "net"}, {"module": {"compile_child": "net"}}),
        ("compile-overhead", {"device": "cuda"}, {"module": {"compile": {"mode": "reduce-overhead"}}}),
        ("sparse", {"embedding": "table"}, {"module": {"sparse": "table"}}),
        ("clipping", {"settings": {"clips": True}}, {"module": {"clip_foreach": True}}),
        ("attention", {"has": ("eager_attention",)}, {"module": {"sdpa": True}}),
        ("checkpointing", {"has": ("checkpointing",)}, {"module": {"not_checkpointed": True}}),
        ("unused-parameters", {"has": ("unused_parameters",)}, {"module": {"all_used": True}}),
    ],
)
def test_a_change_is_built_where_it_applies_and_not_elsewhere(name, facts, set_to):
    assert spec(name, replace(PLAIN, **facts)) == set_to
    if name != "compile":
        assert spec(name) is None


def test_lightning_clips_no_fused_update_in_mixed_precision():
    settings = PLAIN.settings | {"clipped": True}
    fused = replace(PLAIN, bf16=True, settings=settings, optimizers=("AdamW takes-fused fused",))
    assert spec("precision", fused) is None
    assert spec("precision", replace(fused, optimizers=PLAIN.optimizers)) is not None
    assert spec("fused", replace(PLAIN, settings=settings | {"precision": "bf16-mixed"})) is None
    assert spec("fused", replace(PLAIN, settings=settings)) is not None


def test_what_is_compiled_fused_or_in_bf16_already_is_not_made_so():
    assert spec("compile", replace(PLAIN, has=("compiled",))) is None
    assert spec("fused", replace(PLAIN, optimizers=("AdamW fused takes-fused takes-foreach",))) is None
    assert spec("fused", replace(PLAIN, optimizers=("Lion",))) is None
    assert spec("precision", replace(PLAIN, bf16=True, settings={"precision": "bf16-mixed"})) is None


def test_as_many_threads_are_tried_as_the_finding_says():
    assert spec("threads", cause=finding("cpu-starved", fix="OMP_NUM_THREADS=2"))["module"] == {"threads": 2}
    assert spec("threads", replace(PLAIN, threads=8))["module"] == {"threads": 4}
    assert spec("threads") is None


def test_no_change_alters_what_is_learned():
    settable = {"batch_size", "accumulate_grad_batches", "drop_last", "shuffle", "max_epochs", "limit_train_batches"}
    everything = replace(PLAIN, device="cuda", bf16=True, child="net", embedding="table", has=("conv2d",))
    built = [change for row in ROWS if (change := build(row, everything, None)) is not None]
    assert len(built) >= 10
    given = [{**each.spec.get("trainer", {}), **each.spec.get("loader", {}).get("set", {})} for each in built]
    assert not settable & {name for each in given for name in each}


def test_what_cannot_be_done_from_outside_is_left_to_the_user():
    metric = finding("slow-call", evidence={"mistake": "metric-in-step"}, advice="Update it in the step.")
    assert by_hand(analysis(metric, finding("input-bound"))) == {"slow-call": "Update it in the step."}
    assert by_hand(analysis(metric), kept={"slow-call"}) == {}
    update, busy = finding("slow-optimizer"), finding("cpu-starved", advice="Stop the other processes.")
    assert by_hand(analysis(update, busy), {"slow-optimizer"}, asked={"slow-optimizer", "cpu-starved"}) == {}
    both = {"slow-optimizer": "do it", "cpu-starved": "Stop the other processes."}
    assert by_hand(analysis(update, busy), asked={"slow-optimizer"}) == both, "nothing helped, and nothing to change"
    frame = finding(
        "slow-call", evidence={"mistake": "frame-per-sample", "where": "df[k] at a.py:3"}, advice="Convert it."
    )
    assert by_hand(analysis(frame), kept={"slow-call"}) == {"slow-call, df[k] at a.py:3": "Convert it."}


# --- which are kept ---------------------------------------------------------------------------------------------------


class Machine:
    """Runs that take what a function of the changes' names says, on a clock of 10 s a run."""

    def __init__(self, step_ms, failing=(), losses=None, bounds=lambda names: None):
        self.step_ms, self.failing, self.losses, self.bounds = step_ms, failing, losses or {}, bounds
        self.now, self.made, self.diagnosed = 0.0, [], []

    def diagnose(self, changes):
        """A run that tells what bounds the script: no finding, or that of a code."""
        names = tuple(each.name for each in changes)
        self.diagnosed.append(names)
        code, self.now = self.bounds(names), self.now + 10
        found = analysis() if code is None else analysis(finding(code))
        return Measured(None, replace(PLAIN, losses=LOSSES), Path(), 10.0, analysis=found)

    def __call__(self, changes):
        names = tuple(each.name for each in changes)
        self.made.append(names)
        began, self.now = 1000 * len(self.made), self.now + 10
        failed = next((each for each in names if each in self.failing), "")
        losses = next((self.losses[each] for each in names if each in self.losses), LOSSES)
        source = Source(
            source=str(len(self.made)),
            kind="record",
            conditions=Conditions(device="cpu", world_size=1),
            steps=80,
            began_s=began,
            ended_s=began + 1,
            metrics={"step": Estimate(value=self.step_ms(names) * (1 + 0.001 * (len(self.made) % 3)), log_error=0.005)},
        )
        facts = replace(PLAIN, losses=losses)
        return Measured(None if failed else source, facts, Path(), 10.0, f"{failed} fails" if failed else "")


def rows(*names, alters="rounding"):
    return [
        (Row(name, name, (), alters, lambda *_, name=name: Set({"module": {name: 1}}, f"{name}()")), None)
        for name in names
    ]


def search(machine, rows, budget_s=1e6, known=None):
    done = Search(machine, machine.diagnose, budget_s, lambda _: None, clock=lambda: machine.now)
    done.run(changed(machine(()), seconds=10.0), rows if callable(rows) else lambda _: rows, known)
    return done


def states(search):
    return {each.name: each.state for each in search.tried}


def test_what_helps_is_kept_and_what_does_not_is_left_out():
    machine = Machine(lambda names: 100 / (2 if "good" in names else 1) * (1.3 if "bad" in names else 1))
    done = search(machine, rows("bad", "good", "none"))
    assert states(done) == {"bad": "left out", "good": "kept", "none": "left out"}
    assert [change.name for change in done.kept] == ["good"]
    assert done.result().ratio.ratio == pytest.approx(0.5, rel=0.01)
    assert ("good", "none") in machine.made


def test_a_clear_case_takes_a_pair_of_runs_and_a_close_one_three():
    assert len(search(machine := Machine(lambda names: 50 if names else 100), rows("good")).tried) == 1
    assert machine.made == [(), (), ("good",)]
    search(machine := Machine(lambda names: 94 if names else 100), rows("close"))
    assert machine.made == [(), *[(), ("close",)] * 3]


def test_a_kept_change_that_no_longer_helps_is_dropped_at_the_end():
    done = search(
        Machine(lambda names: 10 if "second" in names else 50 if "first" in names else 100), rows("first", "second")
    )
    assert [change.name for change in done.kept] == ["second"]
    assert [each.state for each in done.tried] == ["kept", "kept", "dropped"]
    assert "no longer helps beside second" in done.tried[-1].text
    assert done.result().ratio.ratio == pytest.approx(0.1, rel=0.01)


def test_after_a_kept_change_the_next_cause_is_looked_for():
    """Batches come late; then the GPU's work sets the pace; then faster steps wait for batches again."""
    after = {(): "loads", ("workers",): "works", ("workers", "bf16"): "loads more"}
    named = {"loads": rows("workers", "compile"), "works": rows("bf16"), "loads more": rows("workers", "more")}
    machine = Machine(lambda names: 100 * 0.5 ** len(names), bounds=after.get)
    done = search(machine, lambda of: named.get(of.verdict, []) if of is not None else named["loads"])
    assert [change.name for change in done.kept] == ["workers", "bf16", "more"]
    assert machine.diagnosed == [("workers",), ("workers", "bf16"), ("workers", "bf16", "more")]
    assert "compile" not in states(done), "what no finding calls for any more"


def test_what_was_left_out_is_tried_again_for_another_finding():
    """More workers do nothing for a GPU that computes, and help once its steps are shorter."""
    after = {(): "works", ("bf16",): "loads"}

    def asked(of):
        code = "works" if of is None else of.verdict
        named = {"works": ("more", "bf16"), "loads": ("more",)}.get(code, ())
        return [(each, finding(code)) for each, _ in rows(*named)]

    machine = Machine(lambda names: 100 * 0.5 ** (len(names) - (names == ("more",))), bounds=after.get)
    done = search(machine, asked)
    assert [(each.name, each.state) for each in done.tried] == [
        ("more", "left out"),
        ("bf16", "kept"),
        ("more", "kept"),
    ]


def test_a_group_that_was_asked_for_needs_no_further_look():
    machine = Machine(lambda names: 100 * 0.5 ** len(names))
    done = Search(machine, None, 1e6, lambda _: None, clock=lambda: machine.now)
    done.run(changed(machine(()), seconds=10.0), lambda _: rows("first", "second"))
    assert states(done) == {"first": "kept", "second": "kept"}


def test_without_time_for_a_further_look_the_rest_of_the_first_is_tried():
    machine = Machine(lambda names: 100 * 0.5 ** len(names))
    done = search(machine, rows("first", "second"), budget_s=55)
    assert states(done) == {"first": "kept", "second": "kept"}
    assert not machine.diagnosed


@pytest.mark.parametrize("differ", [0.02, 0.05, 0.1, 0.2])
def test_a_change_that_does_nothing_is_seldom_kept(differ):
    """Equal runs differ by so much."""
    noise = np.random.default_rng(1)
    made = [search(Machine(lambda _: 100 * noise.lognormal(0, differ)), rows("none")) for _ in range(300)]
    assert sum(bool(each.kept) for each in made) <= 0.08 * len(made)


def test_changes_that_help_together_stay():
    done = search(Machine(lambda names: 100 * 0.5 ** len(names)), rows("first", "second"))
    assert [change.name for change in done.kept] == ["first", "second"]
    assert done.result().ratio.ratio == pytest.approx(0.25, rel=0.01)


def test_a_trial_that_fails_is_a_result():
    done = search(Machine(lambda names: 100 * 0.5 ** len(names), failing=["breaks"]), rows("breaks", "good"))
    assert states(done) == {"breaks": "failed", "good": "kept"}
    assert done.tried[0].text == "breaks fails"


def test_a_script_that_fails_without_a_change_ends_the_search():
    machine = Machine(lambda _: 100)
    diagnosed = machine(())
    machine.failing = [""]
    failing = Search(lambda _: changed(diagnosed, failure="no disk"), machine, 1e6, print)
    with pytest.raises(TrialError, match="has failed"):
        failing.run(diagnosed, lambda _: rows("good"))


def test_no_change_is_tried_once_the_budget_is_spent():
    done = search(Machine(lambda names: 100 * 0.5 ** len(names)), rows("first", "second", "third"), budget_s=35)
    assert states(done) == {"first": "kept"}
    assert done.not_tried == {"second()": "no time left", "third()": "no time left"}


def test_what_was_decided_before_an_interrupt_is_known():
    def until(changes):
        if any(each.name == "second" for each in changes):
            raise KeyboardInterrupt
        return machine(changes)

    machine = Machine(lambda names: 50 if names else 100)
    interrupted = Search(until, machine, 1e6, lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        interrupted.run(machine(()), lambda _: rows("first", "second"))
    assert states(interrupted) == {"first": "kept"}
    assert interrupted.result().b == pytest.approx(50, rel=0.01)


def test_what_was_tried_before_is_not_tried_again():
    machine = Machine(lambda names: 50 if names else 100)
    done = search(machine, rows("first", "second"), known={"first()": "tried before"})
    assert states(done) == {"second": "kept"}
    assert done.not_tried == {"first()": "tried before"}


# --- the same training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "alters", "text", "same"),
    [
        (LOSSES, "nothing", "losses bit-identical", True),
        ((1.0, 0.5, 0.25000001), "rounding", "losses differ by 4e-06 %, within rounding", True),
        ((1.0, 0.5, 0.251), "rounding", "losses differ by 0.4 %", True),
        ((1.0, 0.5, 0.251), "nothing", "losses differ by 0.4 %", False),
        ((1.0, 0.5, 0.4), "rounding", "losses differ by 40 %", False),
        ((1.0, 0.5, 0.4), "random numbers", "different random numbers", True),
        ((1.0, float("nan"), 0.4), "rounding", "losses are no longer finite", False),
        ((), "rounding", "losses unknown", False),
        ((), "nothing", "losses unknown", True),
    ],
)
def test_the_first_losses_tell_whether_training_is_the_same(losses, alters, text, same):
    machine = Machine(lambda _: 100, losses={"it": losses})
    change = Change("it", "it()", {}, alters)
    assert same_training(change, machine(()), machine([change])) == (text, same)


def test_a_script_whose_equal_runs_differ_says_nothing_of_a_change():
    machine = Machine(lambda _: 100, losses={"it": (1.0, 0.5, 0.4)})
    change = Change("it", "it()", {}, "nothing")
    assert same_training(change, machine(()), machine([change]), own=0.3) == (
        "losses differ as between equal runs",
        True,
    )


def test_a_change_that_trains_something_else_is_not_kept():
    machine = Machine(lambda names: 50 if names else 100, losses={"wrong": (1.0, 3.0, 9.0)})
    done = search(machine, rows("wrong"))
    assert states(done) == {"wrong": "left out"}
    assert done.tried[0].losses == "losses differ by 100 %"


# --- validation -------------------------------------------------------------------------------------------------------


def test_a_step_has_its_share_of_a_whole_validation():
    facts = TrialFacts(validation_first_s=2.0, validation_batch_s=0.1, validation_batches=11, validation_every=100)
    assert validation_ms(facts) == pytest.approx(30.0)
    assert validation_ms(replace(facts, validation_every=0)) == 0
    source = Machine(lambda _: 100)(()).source
    assert with_validation(source, facts).metrics["step"].value == pytest.approx(source.metrics["step"].value + 30)
    assert with_validation(source, TrialFacts()) is source


# --- what is said -----------------------------------------------------------------------------------------------------

KEPT = TriedChange(
    name="workers",
    code="DataLoader(..., num_workers=8)",
    places=("/data.py:31",),
    cause="input-bound",
    state="kept",
    text="2.29 times as fast (2.2 to 2.4)",
    losses="losses bit-identical",
    before_ms=48.8,
    after_ms=21.3,
    ratio=Ratio(ratio=1 / 2.29, low=1 / 2.4, high=1 / 2.2),
    predicted=Saving(ms_per_step=30.0, pct=60.0, at_most=True, text=""),
)
RESULT = TryResult(
    script="train.py",
    verdict="input-bound",
    tried=(KEPT,),
    before_ms=48.8,
    after_ms=21.3,
    ratio=KEPT.ratio,
    seconds=400,
)


def test_the_result_says_what_to_write_and_where():
    assert tried_line(1, KEPT).split("  ") != []
    assert " ".join(tried_line(1, KEPT).split()) == (
        "try 1 num_workers=8 21.3 ms 2.29 times as fast (2.2 to 2.4) kept, losses bit-identical"
    )
    result, change = last_lines(RESULT)
    assert result == "result     48.8 -> 21.3 ms a step, 2.29 times as fast (2.2 to 2.4), in 6 min 40 s"
    assert change.split() == ["change", "DataLoader(...,", "num_workers=8)", "/data.py:31"]


def test_a_dropped_change_is_none_to_make():
    dropped = replace(KEPT, state="dropped", text="no longer helps", after_ms=None)
    lines = [*last_lines(replace(RESULT, tried=(KEPT, dropped), ratio=None, starts=9))]
    assert lines == ["result     nothing that was tried helps; the script was started 9 times in 6 min 40 s"]
    assert tried_line(2, dropped).startswith("drop 2")


def test_where_nothing_was_tried_the_reason_is_given():
    [line] = last_lines(replace(RESULT, tried=(), ratio=None, starts=1))
    assert "no finding calls for a change that can be made from outside (--all tries each that applies)" in line
    assert line.endswith("the script was started 1 time in 6 min 40 s")


def test_github_gets_both_steps():
    assert [(each["name"], each["value"]) for each in github(RESULT)] == [
        ("step without changes", 48.8),
        ("step with what was kept", 21.3),
    ]


def test_predicted_stands_beside_measured():
    title, line = predictions([RESULT])
    assert title.split()[:2] == ["finding", "change"]
    assert line.split()[:5] == ["input-bound", "num_workers=8", "at", "most", "30.0"]
    assert "27.5" in line
    assert predictions([]) == ["no change was tried for a finding that predicts a saving"]


def test_only_what_did_not_help_the_same_script_here_is_known():
    out = replace(KEPT, state="left out", code="a", text="no difference above 4 %")
    on_top = replace(out, code="b", on_top_of=("workers",))
    before = replace(RESULT, tried=(KEPT, out, on_top), host="here")
    assert known_before([before], replace(RESULT, host="here")) == {
        "a": "tried before: left out, no difference above 4 % (--again tries it again)"
    }
    assert known_before([before], replace(RESULT, host="there")) == {}
    assert known_before([before], replace(RESULT, host="here", arguments="other")) == {}


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("Trainer(..., precision='bf16-mixed')", "precision='bf16-mixed'"),
        ("trainer.fit(torch.compile(model), ...)", "torch.compile(model)"),
        ("unset X", "unset X"),
    ],
)
def test_the_table_has_the_part_of_a_code_that_changes(code, text):
    assert short(code) == text


# --- a call that is left out ------------------------------------------------------------------------------------------

SCRIPT = """\
class M:
    def training_step(self, batch):
        self.log(
            "auc", self.auc(batch))
        loss = self.net(batch)
        return loss
trainer = Trainer(callbacks=[
    First(),
    Second(1),
])
"""


@pytest.mark.parametrize(
    ("line", "removed"),
    [(3, "self.log('auc', self.auc(batch))"), (4, "self.log('auc', self.auc(batch))"), (9, "Second(1)")],
)
def test_a_call_whose_value_nobody_uses_can_be_left_out(line, removed):
    tree, said = without_call(SCRIPT.encode(), "m.py", line)
    assert said == removed
    assert removed not in ast.unparse(tree)
    assert "First()" in ast.unparse(tree)


@pytest.mark.parametrize("line", [1, 5, 6, 99])
def test_another_line_is_refused(line):
    with pytest.raises(ConfigurationError, match=f"m.py:{line} has no call that can be left out"):
        without_call(SCRIPT.encode(), "m.py", line)


# --- wrong input ------------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    Path("train.py").write_text("print('started')\n")
    Path("m.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--yes", "missing.py"], "missing.py: no such file"),
        (["--budget", "soon", "train.py"], "'soon' is not a time such as 90s or 10m"),
        (["--budget", "0", "train.py"], "'0' is not a time"),
        (["--only", "speed", "train.py"], "'speed' is not one of anomaly, workers, precision"),
        (["--yes", "--ablate", "m.py", "train.py"], "m.py: give a file and a line of it"),
        (["--yes", "--ablate", "m.py:5", "train.py"], "m.py:5 has no call that can be left out"),
        (["train.py"], "there is no terminal to ask on: say --yes"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_started(script, capsys, arguments, says):
    assert main(["try", *arguments]) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert "started" not in said.out
    assert not (script / "forge_trials").exists()


@pytest.mark.parametrize(("name", "of"), [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")])
def test_a_rank_of_a_launcher_is_refused_with_the_command_to_use(script, capsys, monkeypatch, name, of):
    monkeypatch.setenv(name, "0")
    assert main(["try", "--yes", "missing.py"]) == 2
    assert "no such file" in capsys.readouterr().err, "a job of one process is none"
    monkeypatch.setenv(of, "2")
    assert main(["try", "--yes", "train.py", "--lr", "1"]) == 2
    assert "forge-profiling try -m torch.distributed.run --nproc-per-node N train.py --lr 1" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1h", 3600), ("45", 45)])
def test_a_budget_is_a_time(text, seconds):
    assert duration(text) == seconds
