"""Switches that slow a run down are named, with how to switch them off; as the verdict if all times include them."""

import gc
import json
import os
import sys
import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_forge_profiling import ThroughputCallback
from lightning_forge_profiling.diagnosis.combine import combine
from lightning_forge_profiling.diagnosis.hints import switch_hints
from lightning_forge_profiling.diagnosis.machine_rules import DISTORTED
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.profiler.collector import records_each_step
from lightning_forge_profiling.schema import Distribution, Switches
from tests.evidence import made_evidence
from tests.models import Classifier, Samples, loader
from tests.outcomes import script, summary_of
from tests.ports import free_port
from tests.synthetic import Synthetic

pytestmark = pytest.mark.untraced  # coverage is such a tracer itself


def fit(make_trainer, *, module=None, data=None, **options):
    """The analysis of a short fit."""
    callback = ThroughputCallback(warmup_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch and Lightning warn of some switches too
        make_trainer(callback, **options).fit(module or Classifier(), data or loader(64))
    return callback.analysis()


def codes(analysis):
    return [hint.code for hint in analysis.hints if hint.code in CODES]


CODES = {hint.code for hint in switch_hints(
    Switches(
        deterministic="cudnn", distributed_debug="INFO", float64_pct=1, tf32_off=True, pin_memory_unused=True,
        eager_attention="GPT2Model", unused_parameters=True,
    )
)}  # fmt: skip


def distorting(analysis):
    """The settings that the verdict names; none if it is another one."""
    first = analysis.findings[0] if analysis.findings else None
    if analysis.verdict != DISTORTED:
        assert DISTORTED not in {finding.code for finding in analysis.findings}
        return ""
    assert (first.code, first.saves) == (DISTORTED, None), "such times predict nothing"
    assert f"{first.title}. {first.advice}" in analysis.verdict_text
    return first.evidence["settings"]


def test_a_healthy_run_names_none(make_trainer, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")  # which does nothing without a GPU
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")  # nor this with one process
    analysis = fit(make_trainer)
    assert analysis.run.settings.switches == Switches()
    assert codes(analysis) == []
    assert distorting(analysis) == ""


def test_anomaly_detection_is_the_verdict_without_a_number(make_trainer, capsys):
    analysis = fit(make_trainer, detect_anomaly=True)
    assert not torch.is_anomaly_enabled()
    assert distorting(analysis) == "anomaly-detection"
    table = " ".join(capsys.readouterr().out.split())
    said = table.partition("verdict ")[2]
    assert said.startswith("distorted-times: anomaly detection is on")
    assert "all times include it: switch it off, then look again. try Trainer(detect_anomaly=False)" in said
    assert "saves" not in said, "of times that include it nothing is known"


def test_several_are_one_verdict(make_trainer):
    with traced_lines():
        analysis = fit(make_trainer, detect_anomaly=True)
    assert distorting(analysis) == "anomaly-detection, tracer"
    assert "all times include them: switch them off, then look again" in analysis.verdict_text


def test_a_switch_that_a_hook_of_the_user_sets_is_detected(make_trainer):
    class Sets(Classifier):
        def on_train_start(self):
            torch.autograd.set_detect_anomaly(mode=True)

    try:
        assert distorting(fit(make_trainer, module=Sets())) == "anomaly-detection"
    finally:
        torch.autograd.set_detect_anomaly(mode=False)


def test_deterministic_algorithms(make_trainer):
    try:
        analysis = fit(make_trainer, deterministic=True)
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert codes(analysis) == ["deterministic"]
    assert distorting(analysis) == "", "the run may be meant to be like that"


def test_float64_parameters(make_trainer):
    assert codes(fit(make_trainer, precision="64-true")) == ["float64"]
    module = Classifier()
    module.register_parameter("scale", torch.nn.Parameter(torch.ones(1, dtype=torch.float64)))
    share = fit(make_trainer, module=module).run.settings.switches.float64_pct
    assert share == pytest.approx(100 / sum(each.numel() for each in module.parameters()))


def test_pinned_memory_without_a_gpu_costs_nothing(make_trainer):
    if torch.accelerator.is_available():
        pytest.skip("there is a GPU to pin memory for")
    analysis = fit(make_trainer, data=DataLoader(Samples(64), batch_size=4, pin_memory=True))
    assert codes(analysis) == ["pin-memory"]
    assert "costs nothing" in analysis.hints[0].text


def test_eager_attention_of_transformers(make_trainer):
    module = Classifier()
    module.config = SimpleNamespace(_attn_implementation="eager")
    assert codes(fit(make_trainer, module=module)) == ["eager-attention"]
    module.config = SimpleNamespace(_attn_implementation="sdpa")
    assert codes(fit(make_trainer, module=module)) == []


@contextmanager
def traced_lines():
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def profiled_calls():
    sys.setprofile(lambda *_: None)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("tracing", [traced_lines, profiled_calls])
def test_a_tracer_of_python_code_is_named_by_where_it_comes_from(make_trainer, tracing):
    with tracing():
        analysis = fit(make_trainer)
    assert distorting(analysis) == "tracer"
    assert "test_switches" in analysis.verdict_text


@pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="Python 3.12 has sys.monitoring")
def test_a_tool_of_sys_monitoring_is_named(make_trainer):
    sys.monitoring.use_tool_id(sys.monitoring.COVERAGE_ID, "measures lines")
    try:
        analysis = fit(make_trainer)
    finally:
        sys.monitoring.free_tool_id(sys.monitoring.COVERAGE_ID)
    assert distorting(analysis) == "tracer"
    assert "measures lines" in analysis.verdict_text


def test_another_torch_profiler(make_trainer):
    with torch.profiler.profile():
        assert distorting(fit(make_trainer)) == "other-profiler"


def test_objects_are_looked_through_only_where_a_profiler_is_active(monkeypatch):
    monkeypatch.setattr(gc, "get_objects", lambda: pytest.fail("that takes 30 ms"))
    assert not records_each_step()


def test_another_torch_profiler_of_few_steps_is_none(make_trainer):
    with torch.profiler.profile(schedule=torch.profiler.schedule(wait=0, warmup=0, active=3, repeat=1)):
        assert distorting(fit(make_trainer)) == ""


@pytest.mark.parametrize(("profiler", "named"), [("simple", ""), ("advanced", "tracer"), ("pytorch", "other-profiler")])
def test_lightnings_own_profilers(make_trainer, profiler, named):
    assert distorting(fit(make_trainer, profiler=profiler)) == named


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="starts processes that find each other with gloo")
def test_the_debug_level_and_ddps_search_for_unused_parameters_of_several_processes(tmp_path):
    environment = {**os.environ, "MASTER_PORT": str(free_port()), "TORCH_DISTRIBUTED_DEBUG": "INFO"}
    done = script("distributed.py", "ddp_find_unused_parameters_true", tmp_path, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "TORCH_DISTRIBUTED_DEBUG=INFO is set" in summary_of(tmp_path)
    assert "find_unused_parameters=True" in summary_of(tmp_path)


def test_what_only_a_gpu_or_several_ranks_have():
    on = Switches(launch_blocking=True, tf32_off=True, deterministic="cudnn", distributed_debug="DETAIL")
    step_ms = Distribution(mean=20.0, p50=20.0, min=20.0, max=20.0)
    analysis = combine(None, made_evidence(steps=38, on_device=True, step_ms=step_ms, regions={}, switches=on))
    by_code = {hint.code: hint.text for hint in analysis.hints}
    assert set(by_code) == {"tf32-off", "deterministic"}
    assert 'set_float32_matmul_precision("high")' in by_code["tf32-off"]
    assert distorting(analysis) == "launch-blocking, distributed-debug"
    assert "compared over all ranks" in analysis.verdict_text
    assert analysis.findings[0].fix == "unset CUDA_LAUNCH_BLOCKING; unset TORCH_DISTRIBUTED_DEBUG"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_float32_products_without_tf32_on_a_gpu(make_trainer):
    tf32 = torch.cuda.get_device_capability() >= (8, 0)
    precision = torch.get_float32_matmul_precision()
    try:
        for chosen, expected in (("highest", ["tf32-off"] if tf32 else []), ("high", [])):
            torch.set_float32_matmul_precision(chosen)
            assert codes(fit(make_trainer, accelerator="gpu", precision="32-true")) == expected
    finally:
        torch.set_float32_matmul_precision(precision)
    assert codes(fit(make_trainer, accelerator="gpu", precision="bf16-mixed")) == []


@pytest.mark.usefixtures("_fp32_settings")
def test_precision_that_was_set_by_the_newer_interface_leaves_the_record_as_it_is(make_trainer, tmp_path):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert fit(make_trainer).run.timing.steps
    [record] = tmp_path.rglob("rank0.jsonl")
    assert json.loads(record.read_text().splitlines()[0])["settings"]["float32_matmul_precision"] == "tf32"


# -- reading tensors' values on the CPU, which a trace shows


def reads(tmp_path, calls, *, inside=""):
    trace = Synthetic()
    trace.step(0, 0, 100)
    trace.operator("aten::mm", 1, 2)
    if inside:
        trace.mark(inside, 5, 95)
    for number in range(calls):
        trace.operator("aten::item", 10 + number, 10.5 + number)
        trace.operator("aten::_local_scalar_dense", 10.1 + number, 10.4 + number)
    return [hint.text for hint in analyze(trace.write(tmp_path)).analysis.hints if hint.code == "item-calls"]


def test_many_reads_of_values_on_the_cpu_are_a_hint_with_their_time(tmp_path):
    [text] = reads(tmp_path, 60)
    assert "60 times a step" in text
    assert "30 % of the recorded step" in text


@pytest.mark.parametrize(("calls", "inside"), [(5, ""), (60, "Optimizer.step#Adam.step")])
def test_few_reads_and_those_of_the_optimizer_are_no_hint(tmp_path, calls, inside):
    assert reads(tmp_path, calls, inside=inside) == []
