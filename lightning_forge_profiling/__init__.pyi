from .bench.benchmark import benchmark as benchmark
from .callbacks.forge_profiler import ForgeProfilerCallback as ForgeProfilerCallback
from .callbacks.throughput import ThroughputCallback as ThroughputCallback
from .callbacks.trainer_profiler import ForgeProfiler as ForgeProfiler
from .compat import SynchronizedWallClockTimer as SynchronizedWallClockTimer
from .compat import ThroughputTimer as ThroughputTimer
from .errors import ForgeProfilingError as ForgeProfilingError
from .flops.count import count_flops as count_flops
from .hugging_face import HuggingFaceCallback as HuggingFaceCallback
from .loop import batches as batches
from .loop import profile as profile
from .loop import step as step
from .pipeline import analyze as analyze
from .schema import Analysis as Analysis
from .timing.collection import CUDATimer as CUDATimer
from .timing.collection import CUDATimerCollection as CUDATimerCollection
from .timing.region import region as region

__version__: str
