"""A fit on a machine that has not what Linux alone has, or no Unix: /proc, control groups, fork, signals and calls."""

import json
import multiprocessing
import sys
from pathlib import Path

HERE = Path(__file__).parents[2]
sys.path.insert(0, str(HERE))

from tests.elsewhere import PYTHON, become  # noqa: E402

if __name__ == "__main__":
    system, workers = sys.argv[1], int(sys.argv[2])
    import lightning  # noqa: F401  (which needs these itself)
    import torch  # noqa: F401

    become(system)
    python = Path("python")
    python.write_text(PYTHON.format(python=sys.executable, here=str(HERE), system=system))
    python.chmod(0o755)
    sys.executable = str(python.absolute())
    multiprocessing.set_executable(sys.executable)

    from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
    from tests.models import Classifier, loader, quiet_trainer

    callback = ForgeProfilerCallback(20, 23)
    quiet_trainer(callback, ThroughputCallback(), default_root_dir=Path.cwd()).fit(
        Classifier(), loader(160, slow="data", num_workers=workers)
    )
    analysis = callback.analysis()
    lines = [f"{line.function} {line.call}" for lines in analysis.run.lines.values() for line in lines]
    print("FOUND", json.dumps({"codes": [each.code for each in analysis.findings], "lines": lines}))
