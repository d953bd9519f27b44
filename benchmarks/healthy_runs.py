"""How often a healthy run gets a verdict, on an idle machine and on busy ones, and how often a starved one is named.

python -m benchmarks.healthy_runs [--runs 10] [--only idle,burner]

Each run is a fresh process: an MLP whose step is computation, without and with a recorded window, and one with two
optimizers. Beside it run processes that only compute: two or eight of them on all cores, or two on the run's own core.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

KINDS = ("plain", "window", "two optimizers")
BURNERS = {"idle": 0, "load 2": 2, "load 8": 8, "burner": 2}
MACHINE = ("cpu-starved", "cpu-throttled", "gil-held")
STEPS = 300


def train(kind: str) -> None:
    """Fit the model, and print the verdict and the findings as JSON."""
    import lightning as L  # noqa: PLC0415  (only in the processes that train)
    import torch  # noqa: PLC0415
    from torch.nn import functional as F  # noqa: PLC0415

    from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback  # noqa: PLC0415

    torch.set_num_threads(1)

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = kind != "two optimizers"
            layers = [torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU()]
            self.body = torch.nn.Sequential(*layers)
            self.head = torch.nn.Linear(1024, 10)

        def training_step(self, batch: Any) -> Any:
            loss = F.cross_entropy(self.head(self.body(batch[0])), batch[1])
            if self.automatic_optimization:
                return loss
            optimizers: Any = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()
            return None

        def configure_optimizers(self) -> Any:
            body, head = (torch.optim.SGD(part.parameters(), 0.01) for part in (self.body, self.head))
            return torch.optim.SGD(self.parameters(), 0.01) if self.automatic_optimization else [body, head]

    batch = torch.rand(256, 256), torch.randint(0, 10, (256,))
    loader: Any = torch.utils.data.DataLoader([batch] * STEPS, batch_size=None)  # type: ignore[arg-type]
    callback = ThroughputCallback(record=False)
    window = [ForgeProfilerCallback(start_step=50, end_step=53)] if kind == "window" else []
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[callback, *window], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=os.environ["FOLDER"],
    )  # fmt: skip
    trainer.fit(Model(), loader)
    analysis = callback.analysis()
    if analysis is None or analysis.run is None:
        raise SystemExit("no analysis")
    cpu = analysis.run.machine.cpu
    result = {
        "verdict": analysis.verdict,
        "findings": {found.code: round(found.share_pct, 1) for found in analysis.findings},
        "waits_pct": cpu and cpu.waits_pct,
        "step_ms": analysis.run.timing.step_ms.mean,
        "text": analysis.verdict_text,
    }
    sys.stdout.write("\n" + json.dumps(result) + "\n")


@contextmanager
def beside(count: int, core: int | None) -> Iterator[None]:
    """Run so many processes that only compute."""
    pin = "" if core is None else f"import os; os.sched_setaffinity(0, {{{core}}})\n"
    running = [subprocess.Popen([sys.executable, "-c", f"{pin}while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def run(kind: str, condition: str, folder: str) -> dict[str, Any]:
    """One run in a process of its own."""
    core = min(os.sched_getaffinity(0)) if condition == "burner" else None
    command = [sys.executable, "-m", "benchmarks.healthy_runs", "--train", kind]
    with beside(BURNERS[condition], core):
        done = subprocess.run(
            command if core is None else ["taskset", "-c", str(core), *command],
            env={**os.environ, "FOLDER": folder}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Print a row for each condition and kind of run, then the sums."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--only", default=",".join(BURNERS))
    parser.add_argument("--train", default="")
    parser.add_argument("--folder", default="/tmp/healthy-runs")  # noqa: S108
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train)
        return
    said: dict[str, Counter[str]] = {}
    for turn in range(arguments.runs):
        for condition in arguments.only.split(","):
            kind = KINDS[turn % len(KINDS)]
            found = run(kind, condition, arguments.folder)
            said.setdefault(condition, Counter())[found["verdict"]] += 1
            sys.stdout.write(
                f"{condition:8} {kind:14} {found['step_ms']:7.2f} ms  waits {found['waits_pct'] or 0:3.0f} %  "
                f"{found['verdict']}  {found['findings']}\n"
            )
            if found["verdict"] not in {*MACHINE, "nothing stands out"}:
                sys.stdout.write(f"    {found['text']}\n")
            sys.stdout.flush()
    for condition, verdicts in said.items():
        sys.stdout.write(f"{condition}: {dict(verdicts)}\n")


if __name__ == "__main__":
    main()
