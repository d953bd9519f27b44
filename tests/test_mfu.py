"""FLOPs and MFU of a run: where the count comes from, what it is compared with, and what is logged and said."""

import logging
import math
import sys

import lightning as L
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed import fsdp
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.callbacks import lightning_api
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.flops.count import count_flops
from lightning_forge_profiling.flops.precision import fp32_runs_as_tf32
from lightning_forge_profiling.report.run_wording import compute_lines
from lightning_forge_profiling.run import compute_rate as peak
from lightning_forge_profiling.run import fit_results
from lightning_forge_profiling.run.compute_rate import peak_of, recorded_compute
from lightning_forge_profiling.schema import Distribution, Flops, Kind, RunCompute, RunTiming
from lightning_forge_profiling.timing.run_totals import RunTotals
from lightning_forge_profiling.timing.steps import StepTimes, StepWork
from tests.fake_nvml import FakeBoard, FakeNvml
from tests.models import Classifier, loader
from tests.outcomes import logged, summary_of, unwrapped, warnings_of
from tests.samples import sample_analysis

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")

TFLOPS = "throughput/tflops_per_device"


def flops_of(row):
    """The operations of a row's mean step, from its rate and its time."""
    return row[TFLOPS] * 1e12 * row["time/step_ms"] / 1e3


class Knows(Classifier):
    """Says itself what a batch is worth, as Lightning's ThroughputMonitor reads it: another number for each batch."""

    @property
    def flops_per_batch(self):
        return 1e6 * self.seen


class LearnsLate(Classifier):
    """Knows what a batch is worth once it has seen one."""

    def training_step(self, batch):
        self.flops_per_batch = 2e9
        return super().training_step(batch)


def test_a_module_may_learn_in_its_first_step_what_a_batch_is_worth(make_trainer):
    callback = ThroughputCallback(warmup_steps=0)
    make_trainer(callback).fit(LearnsLate(), loader(16))
    assert flops_of(callback.summary()) == pytest.approx(2e9)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_number_counts_for_each_micro_batch(tmp_path, make_trainer, accumulate):
    callback = ThroughputCallback(warmup_steps=0, flops_per_batch=2e9, peak_flops=1e12)
    make_trainer(callback, accumulate_grad_batches=accumulate).fit(Classifier(), loader())
    rows = logged(tmp_path)
    for row in [*rows, callback.summary()]:
        assert flops_of(row) == pytest.approx(2e9)
        assert row["throughput/mfu"] == pytest.approx(row[TFLOPS])
    assert [row.get("throughput/peak_tflops") for row in rows] == [1.0, *[None] * (len(rows) - 1)], "once"
    text = summary_of(tmp_path)
    assert f"MFU {100 * callback.summary()['throughput/mfu']:.1f} % of 1 TFLOP/s (cpu, fp32)" in text
    [compute] = callback.analysis().run.machine.compute
    assert (compute.kind, compute.device, compute.peak_tflops) == ("mfu", "cpu", 1)
    assert compute.pct_of_peak == pytest.approx(100 * callback.summary()["throughput/mfu"])


def test_a_function_gets_each_batch(tmp_path, make_trainer):
    callback = ThroughputCallback(warmup_steps=0, flops_per_batch=lambda batch: 1e9 * len(batch[0]))
    make_trainer(callback).fit(Classifier(), loader(30, 4))
    assert [round(flops_of(row) / 1e9) for row in logged(tmp_path)] == [4, 4, 4, 4, 4, 4, 4, 2]


def test_the_modules_own_figure_is_read_after_each_batch(tmp_path, make_trainer):
    make_trainer(ThroughputCallback(warmup_steps=0)).fit(Knows(), loader(16))
    assert [round(flops_of(row) / 1e6) for row in logged(tmp_path)] == [1, 2, 3, 4]


def test_the_argument_goes_before_the_module(tmp_path, make_trainer):
    make_trainer(ThroughputCallback(warmup_steps=0, flops_per_batch=7e9)).fit(Knows(), loader(16))
    assert {round(flops_of(row) / 1e9) for row in logged(tmp_path)} == {7}


def test_the_count_comes_through_whichever_callback_leads(tmp_path, make_trainer):
    callback = ThroughputCallback(warmup_steps=0, flops_per_batch=7e9)
    make_trainer(ForgeProfilerCallback(50, 51), callback).fit(Classifier(), loader(16))
    assert {round(flops_of(row) / 1e9) for row in logged(tmp_path)} == {7}


def test_without_a_count_nothing_is_logged_and_nothing_said(tmp_path, make_trainer, capsys, caplog):
    make_trainer(ThroughputCallback(warmup_steps=0)).fit(Classifier(), loader())
    assert not any("flops" in name or "mfu" in name for row in logged(tmp_path) for name in row)
    assert "TFLOP" not in capsys.readouterr().out
    assert warnings_of(caplog) == []


def test_a_cpu_has_a_rate_and_no_mfu(tmp_path, make_trainer, caplog):
    make_trainer(ThroughputCallback(warmup_steps=0, flops_per_batch=1e9)).fit(Classifier(), loader())
    assert all(TFLOPS in row and "throughput/mfu" not in row for row in logged(tmp_path))
    assert "MFU unknown" in summary_of(tmp_path)
    assert warnings_of(caplog) == []


def raises(batch):
    raise RuntimeError("no idea")


class CannotSay(Classifier):
    @property
    def flops_per_batch(self):
        raise RuntimeError("no idea")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "flops_per_batch raised RuntimeError: no idea"),
        (lambda batch: -1.0, "flops_per_batch returned -1.0"),
        (lambda batch: None, "flops_per_batch returned None"),
        (None, "CannotSay.flops_per_batch raised RuntimeError: no idea"),
    ],
)
def test_a_count_that_is_no_number_costs_the_rate_and_one_warning(tmp_path, make_trainer, caplog, function, message):
    model = CannotSay()
    make_trainer(ThroughputCallback(warmup_steps=0, flops_per_batch=function)).fit(model, loader())
    assert model.seen == 8
    [warning] = warnings_of(caplog)
    assert message in warning
    for row in logged(tmp_path):
        assert TFLOPS not in row
        assert row["throughput/samples_per_sec"] > 0


def test_a_message_that_differs_each_time_is_one_warning(make_trainer, caplog):
    seen = iter(range(100))

    def cannot(batch):
        raise ValueError(f"no length for batch {next(seen)}")

    make_trainer(ThroughputCallback(warmup_steps=0, flops_per_batch=cannot)).fit(Classifier(), loader())
    assert len(warnings_of(caplog)) == 1


def test_each_function_has_its_own_warning(make_trainer, caplog):
    callback = ThroughputCallback(warmup_steps=0, flops_per_batch=raises, tokens_fn=raises, batch_size_fn=raises)
    make_trainer(callback).fit(Classifier(), loader())
    assert sorted(warning.split()[0] for warning in warnings_of(caplog)) == [
        "batch_size_fn",
        "flops_per_batch",
        "tokens_fn",
    ]


def test_one_bad_batch_costs_the_runs_rate_and_the_table_says_so(tmp_path, make_trainer):
    values = iter([1e9, 1e9, math.nan, *[1e9] * 5])
    callback = ThroughputCallback(warmup_steps=0, flops_per_batch=lambda batch: next(values), peak_flops=1e12)
    make_trainer(callback).fit(Classifier(), loader())
    assert "throughput/mfu" not in callback.summary()
    assert "compute     MFU unknown: flops_per_batch returned nan (for 1 of 8 batches)\n" in summary_of(tmp_path)


def test_a_bad_batch_of_the_warm_up_costs_nothing(make_trainer, capsys):
    values = iter([math.nan, *[1e9] * 7])
    callback = ThroughputCallback(warmup_steps=2, flops_per_batch=lambda batch: next(values), peak_flops=1e12)
    make_trainer(callback).fit(Classifier(), loader())
    assert flops_of(callback.summary()) == pytest.approx(1e9)
    assert "unknown" not in capsys.readouterr().out


class HasMethod(Classifier):
    def flops_per_batch(self):
        return 1e9


def test_a_method_of_that_name_is_called_what_it_is(tmp_path, make_trainer, caplog):
    make_trainer(ThroughputCallback(warmup_steps=0)).fit(HasMethod(), loader())
    [warning] = warnings_of(caplog)
    assert "HasMethod.flops_per_batch is a method: make it a property or a number" in warning
    assert "MFU unknown: HasMethod.flops_per_batch is a method" in summary_of(tmp_path)


def test_a_peak_that_nothing_is_compared_with_is_one_line(tmp_path, make_trainer, caplog):
    make_trainer(ThroughputCallback(warmup_steps=0, peak_flops=1e12)).fit(Classifier(), loader())
    printed = summary_of(tmp_path)
    assert printed.count("MFU unknown: FLOPs per batch are unknown") == 1
    assert "flops_per_batch=count_flops(module, batch).total" in printed
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("name", ["flops_per_batch", "peak_flops"])
@pytest.mark.parametrize("value", [0, -1e12, math.nan, math.inf, True, "989e12"])
def test_what_is_no_number_of_operations_is_refused(name, value):
    with pytest.raises(ConfigurationError, match=name):
        ThroughputCallback(**{name: value})


def test_numbers_in_tera_are_refused():
    with pytest.raises(ConfigurationError, match="989e12"):
        ThroughputCallback(peak_flops=989)
    with pytest.raises(ConfigurationError, match=r"2\.5e12"):
        ThroughputCallback(flops_per_batch=2.5)


def test_a_whole_count_of_operations_is_refused_with_what_to_give():
    counted = count_flops(nn.Linear(4, 4), torch.zeros(2, 4))
    with pytest.raises(ConfigurationError, match=r"a FlopCount: give its \.total"):
        ThroughputCallback(flops_per_batch=counted)


def test_more_than_the_device_can_do_is_said(tmp_path, make_trainer):
    callback = ThroughputCallback(warmup_steps=0, flops_per_batch=1e15, peak_flops=1e12)
    make_trainer(callback).fit(Classifier(), loader())
    assert "above the device's peak: the FLOP count or the peak is wrong" in summary_of(tmp_path)


@pytest.mark.parametrize(
    ("device", "pct", "told"),
    [
        ("GeForce RTX 3090", 105.3, "a GeForce runs above its stated clock"),
        ("GeForce RTX 3090", 130.0, "the FLOP count or the peak is wrong"),
        ("H200 SXM", 105.3, "the FLOP count or the peak is wrong"),
        ("GeForce RTX 3090", 99.0, None),
    ],
)
def test_a_geforce_may_exceed_its_peak_a_little(device, pct, told):
    found = RunCompute(
        kind="mfu", tflops=75.0, dtype="bf16", device=device, peak_tflops=71.2, peak_source="sheet", pct_of_peak=pct
    )
    [line] = compute_lines([found])
    assert line.endswith(told or "(GeForce RTX 3090, bf16; sheet)")


def test_devices_that_share_a_batch_share_its_operations():
    rates = RunTiming(steps=2, step_ms=Distribution(mean=500.0), flops=8e12)
    metrics = rates.metrics(replicas=2, devices_per_batch=4, peak_flops=4e12)
    assert metrics[TFLOPS] == pytest.approx(2.0)
    assert metrics["throughput/mfu"] == pytest.approx(0.5)


# -- what the rate is compared with ------------------------------------------------------------------------------


def fitted(make_trainer, model=None, **options):
    """A Trainer that has just begun its fit, as `run_peak` finds it."""
    seen = []

    class Asks(L.Callback):
        def on_train_start(self, trainer, pl_module):
            seen.append(lightning_api.compute_dtype(trainer))

    make_trainer(Asks(), max_steps=1, **options).fit(model or Classifier(), loader(8))
    return seen[0]


class CastByHand(Classifier):
    def configure_model(self):
        self.to(torch.bfloat16)

    def training_step(self, batch):
        x, y = batch
        return super().training_step((x.bfloat16(), y))


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("32-true", "fp32"), ("bf16-mixed", "bf16"), ("bf16-true", "bf16"), ("64-true", "fp64")],
)
def test_the_type_follows_the_trainers_precision(make_trainer, precision, dtype):
    assert fitted(make_trainer, precision=precision) == dtype


def test_the_type_follows_what_the_parameters_are(make_trainer):
    assert fitted(make_trainer, CastByHand()) == "bf16"


class Strategy:
    """The part of a Trainer, or of its `Training`, that says what a run computes in."""

    def __init__(self, model, precision="32-true", device="cpu"):
        self.model, self.root_device = model, torch.device(device)
        self.strategy = self.facts = self
        self.device = self.root_device
        self.precision_plugin = type("Plugin", (), {"precision": precision})()

    def dtype(self):
        return lightning_api.compute_dtype(self)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("16-mixed", "fp16"), ("16-true", "fp16"), ("transformer-engine", "fp8"), ("transformer-engine-float16", "fp8")],
)
def test_the_type_of_precisions_that_need_a_gpu(precision, dtype):
    assert lightning_api.compute_dtype(Strategy(nn.Linear(2, 2), precision)) == dtype


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("precision", "dtype"), [("32-true", "bf16"), ("16-mixed", "fp16")])
def test_the_type_follows_fsdps_param_dtype_unless_autocast_decides(tmp_path, version, precision, dtype):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if version == 1:
            policy = fsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            model = fsdp.FullyShardedDataParallel(model, mixed_precision=policy, device_id=torch.device("cpu"))
        else:
            fsdp.fully_shard(model, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        assert lightning_api.compute_dtype(Strategy(model, precision)) == dtype
    finally:
        dist.destroy_process_group()


LINEAR = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Conv1d(2, 2, 1))
CONVOLUTIONAL = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3), nn.Linear(2, 2))


@pytest.mark.usefixtures("_fp32_settings")
def test_fp32_is_tf32_where_pytorch_allows_it():
    torch.set_float32_matmul_precision("highest")
    assert not fp32_runs_as_tf32(LINEAR)
    assert fp32_runs_as_tf32(CONVOLUTIONAL), "cuDNN's default"
    torch.set_float32_matmul_precision("high")
    assert fp32_runs_as_tf32(LINEAR)
    torch.backends.cuda.matmul.allow_tf32 = False
    assert not fp32_runs_as_tf32(LINEAR)
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # the newer interface, after which the older one raises
    assert fp32_runs_as_tf32(LINEAR)
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    assert not fp32_runs_as_tf32(CONVOLUTIONAL)
    torch.backends.cuda.matmul.fp32_precision = "ieee"


class Recurrent(nn.Module):
    """Two layers of an LSTM and a head, as most recurrent models."""

    def __init__(self, heads=1, **options):
        super().__init__()
        self.recurrent = nn.LSTM(8, 8, **options)
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(heads))


@pytest.mark.usefixtures("_fp32_settings")
def test_recurrent_layers_follow_cudnns_setting(monkeypatch):
    torch.set_float32_matmul_precision("highest")
    assert fp32_runs_as_tf32(Recurrent()), "cuDNN's default"
    assert fp32_runs_as_tf32(Recurrent(num_layers=2, bidirectional=True, heads=7))
    assert not fp32_runs_as_tf32(Recurrent(heads=3)), "most of it are products of other layers"
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", "ieee")
    assert not fp32_runs_as_tf32(Recurrent())
    assert fp32_runs_as_tf32(CONVOLUTIONAL), "a switch of its own"


class Properties:
    def __init__(self, name, memory_gib, sms, capability):
        self.name, self.total_memory, self.multi_processor_count = name, int(memory_gib * 2**30), sms
        self.major, self.minor = capability
        self.uuid = "8932f937-d72c-4106-c12f-20bd9faed9f6"


def gpu(monkeypatch, *properties):
    device = Properties(*properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: device.name)


H200 = ("NVIDIA H200", 139.8, 132, (9, 0))
T4 = ("Tesla T4", 14.6, 40, (7, 5))


@pytest.mark.usefixtures("_fp32_settings")
@pytest.mark.parametrize(
    ("device", "precision", "matmul", "expected"),
    [
        (H200, "bf16-mixed", "highest", ("bf16", 989)),
        (H200, "32-true", "highest", ("fp32", 67)),
        (H200, "32-true", "high", ("tf32", 494.5)),
        (T4, "32-true", "high", ("fp32", 8.1)),
        (T4, "16-mixed", "highest", ("fp16", 65)),
    ],
)
def test_the_peak_is_that_of_the_device_and_the_type(monkeypatch, device, precision, matmul, expected):
    gpu(monkeypatch, *device)
    torch.set_float32_matmul_precision(matmul)
    found = peak.run_peak(Strategy(LINEAR, precision, "cuda"), None)
    dtype, tflops = expected
    assert found.dtype == dtype
    assert found.peak_tflops == pytest.approx(tflops, rel=0.01)
    assert found.peak_source


@pytest.mark.parametrize(
    ("device", "precision", "why"),
    [
        (("NVIDIA Foo 9000", 24.0, 100, (9, 0)), "bf16-mixed", "NVIDIA Foo 9000 is not in the peak table"),
        (("NVIDIA H200 MIG 1g.18gb", 16.0, 16, (9, 0)), "bf16-mixed", "is not in the peak table"),
        (T4, "bf16-mixed", "no bf16 rate for T4"),
    ],
)
def test_an_unknown_device_has_no_peak_unless_it_is_given(monkeypatch, device, precision, why):
    gpu(monkeypatch, *device)
    trainer = Strategy(LINEAR, precision, "cuda")
    found = peak.run_peak(trainer, None)
    assert found.peak_tflops is None
    assert why in found.peak_source
    assert peak.run_peak(trainer, 5e14) == peak_of(device[0], "bf16", 500, "given")


@pytest.mark.parametrize(("watts", "device"), [(300, "V100 SXM2"), (250, None)])
def test_where_the_name_stands_for_several_devices_the_power_limit_may_tell(monkeypatch, watts, device):
    """A V100 that is allowed 300 W is no PCIe card; one that is allowed 250 W may be either."""
    gpu(monkeypatch, "Tesla V100-32GB", 31.7, 80, (7, 0))
    board = FakeBoard(name="Tesla V100-32GB")
    board.milliwatt_limit = watts * 1000
    nvml = FakeNvml(board)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = peak.run_peak(Strategy(LINEAR, "16-mixed", "cuda"), None)
    assert (found.device if found.peak_tflops else None) == device
    assert nvml.opened == 0
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert peak.run_peak(Strategy(LINEAR, "16-mixed", "cuda"), None).peak_tflops is None


@pytest.mark.parametrize(
    ("device", "counts"),
    [
        (("NVIDIA Foo 9000", 24.0, 100, (9, 0)), True),
        (("NVIDIA RTX 5000 Ada Generation", 31.5, 100, (8, 9)), True),
        (H200, True),
        (("Tesla V100-32GB", 31.7, 80, (7, 0)), False),
    ],
)
def test_nvml_is_asked_only_where_that_may_tell_a_device_and_somebody_counts(monkeypatch, device, counts):
    gpu(monkeypatch, *device)
    monkeypatch.setattr(peak, "open_nvml", lambda: pytest.fail("loaded"))
    found = peak.run_peak(Strategy(LINEAR, "16-mixed", "cuda"), None, asks_power=counts)
    assert (found.peak_tflops is not None) == (device is H200)


def test_a_run_that_counts_nothing_looks_up_no_peak(monkeypatch, make_trainer):
    monkeypatch.setattr(peak, "run_peak", lambda *_, **__: pytest.fail("looked up"))
    callback = ThroughputCallback(warmup_steps=0)
    make_trainer(callback).fit(Classifier(), loader())
    assert callback.summary()["throughput/samples_per_sec"] > 0


@pytest.mark.parametrize("counts", [False, True])
def test_the_power_is_asked_for_where_somebody_counts(monkeypatch, make_trainer, counts):
    asked = []

    def look_up(trainer, given, *, asks_power):
        asked.append(asks_power)
        return BF16

    monkeypatch.setattr(peak, "run_peak", look_up)
    flops = 1e9 if counts else None
    make_trainer(ThroughputCallback(flops_per_batch=flops, peak_flops=1e12)).fit(Classifier(), loader(8))
    assert asked == [counts]


FOO = peak_of("NVIDIA Foo 9000", "fp32", None, "NVIDIA Foo 9000 is not in the peak table")


@pytest.mark.parametrize("every", [1, 0])
def test_an_unknown_device_is_said_once_too_where_the_module_learns_late(
    tmp_path, monkeypatch, make_trainer, caplog, every
):
    monkeypatch.setattr(peak, "run_peak", lambda *_, **__: FOO)
    make_trainer(ThroughputCallback(warmup_steps=0, log_every_n_steps=every)).fit(LearnsLate(), loader())
    [warning] = warnings_of(caplog)
    assert "peak_flops=989e12" in warning
    printed = summary_of(tmp_path)
    assert "MFU unknown: NVIDIA Foo 9000 is not in the peak table" in printed
    assert "peak_flops=" not in printed, "one message in all"


def test_an_unknown_device_is_said_once_too_where_the_window_tells_the_operations(
    tmp_path, monkeypatch, make_trainer, caplog
):
    monkeypatch.setattr(peak, "run_peak", lambda *_, **__: FOO)
    foo = rank(per_step=6e9, model_per_step=5e9, peak_tflops=None)
    summary = run_with_window(monkeypatch, make_trainer, foo, peak_flops=None)
    assert flops_of(summary) == pytest.approx(5e9)
    assert not {"throughput/mfu", "throughput/hfu"} & summary.keys()
    assert not any("peak_flops" in warning for warning in warnings_of(caplog))
    printed = summary_of(tmp_path)
    assert printed.count("is not in the peak table") == 1
    assert printed.count("give the device's dense bf16 rate") == 1, "of the type that it really computes in"
    assert "ThroughputCallback(peak_flops=989e12)" in printed


def test_an_unknown_device_is_said_once_with_what_to_do(monkeypatch, make_trainer, caplog):
    gpu(monkeypatch, "NVIDIA Foo 9000", 24.0, 100, (9, 0))
    on_gpu = Strategy(LINEAR, "bf16-mixed", "cuda")
    monkeypatch.setattr(
        peak, "run_peak", lambda _, given, look_up=peak.run_peak, **options: look_up(on_gpu, given, **options)
    )
    make_trainer(ThroughputCallback(warmup_steps=0, flops_per_batch=1e9)).fit(Classifier(), loader())
    [warning] = warnings_of(caplog)
    assert "NVIDIA Foo 9000" in warning
    assert "ThroughputCallback(peak_flops=989e12)" in warning


def test_what_the_fraction_is_of_is_logged_as_a_message(make_trainer, caplog):
    with caplog.at_level(logging.INFO, logger="lightning_forge_profiling"):
        make_trainer(ThroughputCallback(flops_per_batch=1e9, peak_flops=1e12)).fit(Classifier(), loader(8))
    assert [r.message for r in caplog.records if r.message.startswith("MFU is of")] == [
        "MFU is of 1 TFLOP/s (cpu, fp32; given)."
    ]


def test_a_peak_that_cannot_be_looked_up_costs_the_mfu_alone(monkeypatch, tmp_path, make_trainer, caplog):
    def moved(trainer):
        raise AttributeError("Lightning moved it")

    monkeypatch.setattr(lightning_api, "compute_dtype", moved)
    make_trainer(ThroughputCallback(warmup_steps=0, flops_per_batch=1e9)).fit(Classifier(), loader())
    assert all(TFLOPS in row for row in logged(tmp_path))
    [warning] = warnings_of(caplog)
    assert "Lightning moved it" in warning


# -- what the recorded window gives ------------------------------------------------------------------------------


def books(tokens=(None, None, None, None)):
    """A run whose first two steps were recorded and whose others took 10 ms each."""
    totals = RunTotals()
    for step, held in enumerate(tokens):
        times = StepTimes(step, {"forward": 10.0}, {})
        totals.add(times, StepWork(4, held), "recorded" if step < 2 else None)
    return totals.timing(steps=len(tokens), before_first_s=0.0, wall_s=1.0)


def rank(**changes):
    flops = Flops(
        per_step=4e12,
        model_per_step=4e12,
        counted_pct=100.0,
        matmul_tflops=500.0,
        busy_tflops=450.0,
        step_tflops=300.0,
        dtype="bf16",
        peak_tflops=989.0,
        matmul_pct_of_peak=50.6,
        busy_pct_of_peak=45.5,
        uncounted=(),
    )
    return replace(sample_analysis().ranks[0], device="NVIDIA H200", kinds={}, flops=replace(flops, **changes))


BF16 = peak_of("H200 SXM", "bf16", 989, "data sheet")


def of_window(run, rank, peak=BF16, *, peak_is_given=False, model_is_counted=False):
    return recorded_compute(run, rank, (0, 1), peak, peak_is_given=peak_is_given, model_is_counted=model_is_counted)


def test_recorded_operations_count_over_the_time_of_steps_that_were_not():
    [found] = of_window(books(), rank())
    assert found.kind == "mfu", "nothing was computed a second time"
    assert found.tflops == pytest.approx(4 / 10e-3)
    assert found.pct_of_peak == pytest.approx(100 * 400 / 989)
    assert found.note == "by the recorded shapes"


def test_what_is_computed_a_second_time_is_in_hfu_alone():
    model, hardware = of_window(books(), rank(model_per_step=3e12))
    assert (model.kind, hardware.kind) == ("mfu", "hfu")
    assert model.tflops == pytest.approx(3 / 10e-3)
    assert hardware.tflops == pytest.approx(4 / 10e-3)


def test_where_a_second_time_cannot_be_told_it_is_called_hfu():
    [found] = of_window(books(), rank(model_per_step=None))
    assert (found.kind, found.tflops) == ("hfu", pytest.approx(4 / 10e-3))


def test_what_the_user_counts_goes_before_what_the_window_tells():
    [found] = of_window(books(), rank(), model_is_counted=True)
    assert (found.kind, found.note) == ("hfu", "")


def test_batches_of_other_lengths_are_scaled_by_their_tokens_and_it_says_so():
    [found] = of_window(books((100, 300, 500, 700)), rank())
    assert found.tflops == pytest.approx(4 * 600 / 200 / 10e-3)
    assert "scaled from the 200 tokens of a recorded step to the mean 600" in found.note


def test_the_type_that_was_recorded_decides_unless_a_peak_is_given():
    tf32 = peak_of("H200 SXM", "tf32", 494.5, "data sheet")
    assert of_window(books(), rank(), tf32)[0].peak_tflops == 989
    assert of_window(books(), rank(), tf32, peak_is_given=True)[0].peak_tflops == 494.5
    plain = rank(dtype="fp32", peak_tflops=67.0)
    assert of_window(books(), plain, tf32)[0].peak_tflops == 494.5, "names hide TF32"
    assert of_window(books(), plain, BF16)[0].peak_tflops == 67, "autocast was off inside of the module"


def test_what_could_not_be_counted_is_said():
    [found] = of_window(books(), rank(counted_pct=80.0))
    assert "80 % by time could be counted" in found.note


def test_what_most_of_could_not_be_counted_has_a_rate_and_no_share():
    operators = ("flash_attn::_flash_attn_forward", "a::b", "c::d", "e::f", "g::h")
    partly = rank(counted_pct=9.0, per_step=5e12, uncounted=operators)
    model, hardware = recorded_compute(books(), partly, (0, 1), BF16, peak_is_given=True)
    assert (model.tflops, hardware.tflops) == pytest.approx((400, 500))
    assert (model.pct_of_peak, hardware.pct_of_peak) == (None, None)
    assert model.note.endswith(
        "9 % by time could be counted; not counted: flash_attn::_flash_attn_forward, a::b, c::d and 2 more"
    )
    assert "not counted" not in hardware.note, "named once"


def test_from_95_percent_on_there_is_a_share():
    assert of_window(books(), rank(counted_pct=94.9))[0].pct_of_peak is None
    [found] = of_window(books(), rank(counted_pct=95.0, uncounted=("a::b",)))
    assert found.pct_of_peak == pytest.approx(100 * 400 / 989)
    assert "not counted: a::b" in found.note


@pytest.mark.parametrize(
    ("expected", "why"),
    [
        (FOO, "NVIDIA Foo 9000 is not in the peak table"),
        (peak_of("T4", "fp16", 65, "data sheet"), "the peak table has no bf16 rate for T4"),
        (
            peak_of("T4", "fp8", None, peak.no_rate_for("fp8", "T4")),
            "the peak table has no bf16 rate for T4",
        ),
    ],
)
def test_where_the_recorded_type_has_no_peak_it_is_said_why(expected, why):
    [found] = of_window(books(), rank(peak_tflops=None), expected)
    assert (found.pct_of_peak, found.dtype, found.peak_source) == (None, "bf16", why)


def test_how_attention_counts_is_said():
    attention = Kind(category="other", ms_per_step=1.0, pct=10.0, calls_per_step=4.0)
    [found] = of_window(books(), replace(rank(), kinds={"attention": attention}))
    assert "attention counted in full, causal or not" in found.note


def test_no_operations_or_no_steps_give_no_rate():
    assert of_window(books(), replace(rank(), flops=None)) == ()
    assert of_window(RunTotals().timing(steps=0, before_first_s=0.0, wall_s=1.0), rank()) == ()


def run_with_window(monkeypatch, make_trainer, rank, flops_per_batch=None, peak_flops=1e12):
    """The metrics of a run whose recorded window gave this: a CPU's trace has no kernels."""
    analysis = replace(sample_analysis(), ranks=(rank,))
    monkeypatch.setattr(fit_results, "recorded_analysis", lambda trace: analysis)
    callback = ThroughputCallback(warmup_steps=0, flops_per_batch=flops_per_batch, peak_flops=peak_flops)
    make_trainer(ForgeProfilerCallback(1, 2, analyze=False), callback).fit(Classifier(), loader())
    return callback.summary()


def test_the_recorded_operations_are_logged_and_shown_at_the_end(monkeypatch, tmp_path, make_trainer):
    summary = run_with_window(monkeypatch, make_trainer, rank(per_step=6e9, model_per_step=5e9))
    for name, flops in (("throughput/mfu", 5e9), ("throughput/hfu", 6e9)):
        assert summary[name] == pytest.approx(flops / summary["time/step_ms"] * 1e3 / 1e12)
    assert flops_of(summary) == pytest.approx(5e9)
    [row] = logged(tmp_path, "throughput/hfu")
    assert row["throughput/hfu"] == pytest.approx(summary["throughput/hfu"])
    assert row["throughput/mfu"] == pytest.approx(summary["throughput/mfu"])
    assert row["throughput/peak_tflops"] == 1
    text = summary_of(tmp_path)
    assert f"TFLOP/s per device, MFU {100 * summary['throughput/mfu']:.1f} % of 1 TFLOP/s" in text
    assert "by the recorded shapes" in text
    assert f"TFLOP/s per device carried out, HFU {100 * summary['throughput/hfu']:.1f} % of the same" in text


def test_beside_the_users_count_the_recorded_operations_are_what_was_carried_out(
    monkeypatch, tmp_path, make_trainer, capsys
):
    summary = run_with_window(monkeypatch, make_trainer, rank(per_step=6e9, model_per_step=5e9), flops_per_batch=3e9)
    assert flops_of(summary) == pytest.approx(3e9), "what the user says goes before"
    assert summary["throughput/hfu"] == pytest.approx(6e9 / summary["time/step_ms"] * 1e3 / 1e12)
    [row] = logged(tmp_path, "throughput/hfu")
    assert "throughput/mfu" not in row
    assert row["throughput/hardware_tflops_per_device"] == pytest.approx(row["throughput/hfu"]), "of a peak of 1"
    assert "by the recorded shapes" not in capsys.readouterr().out


def test_a_window_of_which_little_could_be_counted_is_told_and_not_logged(monkeypatch, tmp_path, make_trainer):
    partly = rank(per_step=6e9, model_per_step=5e9, counted_pct=9.0, uncounted=("flash_attn::_flash_attn_forward",))
    summary = run_with_window(monkeypatch, make_trainer, partly)
    assert not any("mfu" in name or "hfu" in name or "flops" in name for name in summary)
    assert not any("mfu" in name or "tflops" in name for row in logged(tmp_path) for name in row)
    text = summary_of(tmp_path)
    assert "MFU unknown: the FLOPs of too few operators are known" in text
    assert text.count("flash_attn::_flash_attn_forward") == 1


def test_where_the_users_count_fails_the_windows_is_shown_and_says_so(tmp_path, monkeypatch, make_trainer):
    summary = run_with_window(monkeypatch, make_trainer, rank(per_step=5e9, model_per_step=5e9), flops_per_batch=raises)
    assert flops_of(summary) == pytest.approx(5e9)
    printed = summary_of(tmp_path)
    assert "by the recorded shapes; flops_per_batch raised RuntimeError: no idea (for 8 of 8" in printed


# -- on a GPU ----------------------------------------------------------------------------------------------------


class Wide(L.LightningModule):
    """Square layers that keep a GPU busy; the last can be computed again in the backward pass."""

    def __init__(self, *, recompute=False):
        super().__init__()
        self.recompute = recompute
        layers = (part for _ in range(8) for part in (nn.Linear(4096, 4096), nn.GELU()))
        self.layers = nn.Sequential(*layers)

    def training_step(self, batch, i):
        x = checkpoint(self.layers, batch, use_reentrant=False) if self.recompute else self.layers(batch)
        return x.float().square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


@pytest.mark.gpu
@pytest.mark.usefixtures("_fp32_settings")
@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", "bf16"), ("32-true", "tf32")])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_run_on_a_gpu_is_as_fast_by_its_batches_as_by_its_trace(tmp_path, precision, dtype, recompute):
    torch.set_float32_matmul_precision("high")
    model = Wide(recompute=recompute)
    batch = torch.randn(4096, 4096)
    with torch.device("meta"):
        counted = count_flops(Wide(recompute=recompute), torch.empty(4096, 4096))
    throughput = ThroughputCallback(flops_per_batch=counted.total)
    summary = train_wide(model, batch, throughput, tmp_path, precision)
    assert f", {dtype})" in unwrapped(summary_of(tmp_path))
    assert 0 < summary["throughput/mfu"] <= 1
    assert (counted.recomputed > 0) == recompute
    ratio = summary["throughput/hfu"] / summary["throughput/mfu"]
    assert ratio == pytest.approx(counted.hardware / counted.total, rel=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_trace_alone_tells_what_the_model_asks_for(tmp_path, recompute, compiled):
    model = Wide(recompute=recompute)
    batch = torch.randn(4096, 4096)
    with torch.device("meta"):
        counted = count_flops(Wide(recompute=recompute), torch.empty(4096, 4096))
    module = torch.compile(model) if compiled else model
    summary = train_wide(module, batch, ThroughputCallback(), tmp_path, "bf16-mixed")
    hidden = compiled and recompute
    assert ("throughput/mfu" in summary) == (not hidden), "compiled code may hide it"
    assert ("throughput/hfu" in summary) == recompute
    if recompute:
        rate = summary["throughput/hardware_tflops_per_device"]
        assert rate * 1e9 * summary["time/step_ms"] == pytest.approx(counted.hardware, rel=0.001)
    if hidden:
        assert TFLOPS not in summary
    else:
        assert flops_of(summary) == pytest.approx(counted.total, rel=0.001)
    if "throughput/mfu" in summary and recompute:
        ratio = summary["throughput/hfu"] / summary["throughput/mfu"]
        assert ratio == pytest.approx(counted.hardware / counted.total, rel=0.001)


def train_wide(model, batch, throughput, tmp_path, precision):
    """Train on a GPU, recording three steps, and return the metrics."""
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        precision=precision,
        max_steps=60,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[ForgeProfilerCallback(20, 23), throughput],
    )
    trainer.fit(model, DataLoader([batch] * 60, batch_size=None))
    return throughput.summary()
