"""Hugging Face's Trainer: an unchanged script under `run`, a callback, and a loop with Accelerate."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.outcomes import HANGS_S

CHECKOUT = Path(__file__).parent.parent
SCRIPT = CHECKOUT / "tests/scripts/hugging_face.py"
RUN = (sys.executable, "-m", "lightning_forge_profiling", "run")


def ran(folder, command, **settings):
    options = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, *options], cwd=folder, env=environment, check=False, timeout=HANGS_S, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done


def weights(done):
    return re.search(r"^WEIGHTS (.*)$", done.stdout, re.MULTILINE)[1]


def summary_of(folder):
    [path] = folder.rglob("summary.json")
    return json.loads(path.read_text())


@pytest.mark.slow
def test_an_unchanged_script_is_profiled_under_run(tmp_path):
    settings = {
        "max_steps": 100,
        "eval_strategy": "steps",
        "eval_steps": 40,
        "save_strategy": "steps",
        "save_steps": 40,
    }
    done = ran(tmp_path, (*RUN, SCRIPT), **settings)
    plain = tmp_path / "plain"
    plain.mkdir()
    assert weights(done) == weights(ran(plain, (sys.executable, SCRIPT), **settings)), "bit for bit"
    assert "Where a step goes: " in done.stderr + done.stdout
    summary = summary_of(tmp_path / "out")
    run = summary["run"]
    assert {"data", "forward", "backward", "optimizer"} <= {*run["timing"]["regions"]}
    assert run["timing"]["regions"]["data"]["host_ms"] >= 8, "four samples that wait 2 ms each"
    finding = next(each for each in summary["findings"] if each["code"] == "input-bound")
    assert "time.sleep(0.002) at" in finding["title"]
    assert re.match(r"TrainingArguments\(\.\.\., dataloader_num_workers=\d", finding["fix"]), (
        "no DataLoader of the script's"
    )
    parts = run["ledger"]["parts"]
    assert parts["validation/loader"] + parts.get("validation/data", 0.0) >= 2 * 16 * 0.002, "two evaluations"
    assert parts["checkpoint"] > 0
    assert sum(parts.values()) + run["ledger"]["unexplained_s"] == pytest.approx(run["ledger"]["wall_s"])


@pytest.mark.slow
def test_a_step_of_several_batches_is_one_update(tmp_path):
    done = ran(tmp_path, (*RUN, SCRIPT), max_steps=50, gradient_accumulation_steps=3)
    run = summary_of(tmp_path / "out")["run"]
    assert run["timing"]["regions"]["data"]["host_ms"] >= 24, "twelve samples that wait 2 ms each"
    step_s = run["timing"]["step_ms"]["mean"] / 1e3
    samples_per_s = re.search(r"^throughput +([\d,.]+) samples/s", done.stderr + done.stdout, re.MULTILINE)[1]
    assert float(samples_per_s) == pytest.approx(12 / step_s, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["ours", "transformers"])
def test_a_script_with_its_own_callback_keeps_it_under_run(tmp_path, first):
    """Whichever it imports first."""
    imports = ["from lightning_forge_profiling import HuggingFaceCallback", "from transformers import Trainer"]
    lines = WITH_CALLBACK.replace("from transformers import Trainer, ", "from transformers import ").splitlines()
    path = tmp_path / "script.py"
    path.write_text(
        "\n".join((imports if first == "ours" else imports[::-1]) + lines).replace("sys.argv[1]", repr(str(CHECKOUT)))
    )
    done = ran(tmp_path, (*RUN, path))
    assert (done.stdout + done.stderr).count("Where a step goes: ") == 1
    [folder] = (tmp_path / "out/profiler_traces").iterdir()
    assert folder.name.endswith("steps_10-12"), "the window that it asks for"


WITH_CALLBACK = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from transformers import Trainer, TrainingArguments
from lightning_forge_profiling import ForgeProfilerCallback, HuggingFaceCallback
from tests.scripts.hugging_face import Model, Rows

saves = Trainer._save_checkpoint
callback = HuggingFaceCallback(ForgeProfilerCallback(start_step=10, end_step=13))
arguments = TrainingArguments("out", report_to=[], max_steps=40, use_cpu=True, disable_tqdm=True, save_strategy="no")
trainer = Trainer(Model(), arguments, train_dataset=Rows(400), callbacks=[callback])
trainer.train()
assert "Where a step goes" in repr(callback)
assert "<table" in callback._repr_html_()
assert Trainer._save_checkpoint is saves
"""


@pytest.mark.slow
def test_a_callback_records_a_window_into_the_output_folder(tmp_path):
    done = ran(tmp_path, (sys.executable, "-c", WITH_CALLBACK, str(CHECKOUT)))
    assert (done.stdout + done.stderr).count("Where a step goes: ") == 1
    assert summary_of(tmp_path / "out/profiler_traces")["run"]["timing"]["steps"] >= 20
    assert [path.name for path in (tmp_path / "out/forge_record").iterdir()] == ["rank0.jsonl"]


AFTER_A_FAILURE = """
import sys
sys.path.insert(0, sys.argv[1])
from transformers import Trainer, TrainingArguments
from lightning_forge_profiling import HuggingFaceCallback, ThroughputCallback
from tests.scripts.hugging_face import Model, Rows

class Fails(Model):
    calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 20:
            raise RuntimeError("planted")
        return super().forward(x)

throughput = ThroughputCallback(warmup_steps=3)
callback = HuggingFaceCallback(throughput)
arguments = TrainingArguments("out", report_to=[], max_steps=40, use_cpu=True, disable_tqdm=True, save_strategy="no")
failing = HuggingFaceCallback() if "another" in sys.argv else callback
try:
    Trainer(Fails(), arguments, train_dataset=Rows(400), callbacks=[failing]).train()
except RuntimeError:
    pass
Trainer(Model(), arguments, train_dataset=Rows(400), callbacks=[callback]).train()
print("STEPS", throughput.analysis().run.timing.steps)
"""


@pytest.mark.slow
@pytest.mark.parametrize("which", ["the same", "another"])
def test_a_training_after_one_that_failed_has_a_table_of_its_own(tmp_path, which):
    done = ran(tmp_path, (sys.executable, "-c", AFTER_A_FAILURE, str(CHECKOUT), which))
    assert (done.stdout + done.stderr).count("Where a step goes: ") == 2
    assert 30 <= int(re.search(r"^STEPS (\d+)$", done.stdout, re.MULTILINE)[1]) <= 40


WITH_ACCELERATE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from accelerate import Accelerator
import lightning_forge_profiling as forge
from tests.scripts.hugging_face import Model, Rows

accelerator = Accelerator(cpu=True)
model = Model()
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, data = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(Rows(160), 4))
with forge.profile(log_dir="out"):
    for batch in data:
        with forge.step():
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_loop_with_accelerate_is_a_plain_loop(tmp_path):
    done = ran(tmp_path, (sys.executable, "-c", WITH_ACCELERATE, str(CHECKOUT)))
    assert re.search(r"^data .* \d", done.stdout + done.stderr, re.MULTILINE)
    assert "input-bound" in done.stdout + done.stderr
