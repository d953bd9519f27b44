"""Where every millisecond of a PyTorch Lightning run goes, and what to change first.

```python
import lightning as L
from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback

trainer = L.Trainer(callbacks=[ForgeProfilerCallback(), ThroughputCallback()])
```

The public names are in `__init__.pyi`, here and in `bench`, `gpu`, `profiler` and `report`. Each is imported
when it is first used: `import lightning_forge_profiling` alone loads neither torch nor Lightning.
"""

from lightning_forge_profiling.lazy import names_of_stub

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = names_of_stub(__name__)

NOTEBOOK_RENDERER = "lightning_forge_profiling.report.page"  # its `html_of` shows results in notebooks
