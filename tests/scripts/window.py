"""Record a window with `build_profiler`, from the package in FOLDER: a folder or an archive. Then say what came of it.

Options: `append` puts FOLDER behind the standard library and not before it, `hook` lets an import hook find the package
there, as an editable install does, `here` puts the working directory on the path by PYTHONPATH.
"""

import os
import sys
from importlib.machinery import PathFinder

folder, trace_dir, *options = sys.argv[1:]


class Hook:
    """Finds our package and no other."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [folder]) if name == "lightning_forge_profiling" else None


if "hook" in options:
    sys.meta_path.insert(0, Hook)
else:
    sys.path.insert(len(sys.path) if "append" in options else 0, folder)

import torch  # noqa: E402  (where from is the point)

from lightning_forge_profiling import __file__  # noqa: E402
from lightning_forge_profiling.profiler import ProfilingConfig, build_profiler  # noqa: E402

assert __file__.startswith(folder), __file__

if "here" in options:
    os.environ["PYTHONPATH"] = os.pathsep + os.environ.get("PYTHONPATH", "")  # an empty part is the working directory

with build_profiler(ProfilingConfig(enable=True, start_step=1, end_step=2, trace_dir=trace_dir)) as profiler:
    for _ in range(3):
        torch.ones(8).sum()
        profiler.step()
print(profiler.report)
