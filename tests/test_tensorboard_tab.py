"""The profiler tab of a real TensorBoard, on real traces, against numbers computed from the canonical traces."""

import gzip
import json
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from selenium.webdriver.common.by import By
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

from lightning_forge_profiling.kineto.copies import write_plugin_copy
from tests.browser import chromium, tensorboard_server, wait_until

pytestmark = pytest.mark.slow

TRACES = Path(__file__).parent / "data" / "traces"
WORKERS = {"input_bound": ["rank0"], "launch_bound": ["rank0"], "ddp_comm_bound": ["rank0", "rank1"]}
EACH_WORKER = pytest.mark.parametrize(
    ("case", "worker"), [(case, worker) for case, workers in WORKERS.items() for worker in workers]
)
LOADERS = ("torch_loader", "other_loader")
CASES = (*WORKERS, *LOADERS, "modules")


def run_name(case):
    return f"version_0/{case}/tensorboard"


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    """Traces as the package lays them out, with the canonical file beside the copy too."""
    root = tmp_path_factory.mktemp("logdir")
    with SummaryWriter(str(root / "version_0")) as writer:
        for step in range(3):
            writer.add_scalar("time/step_ms", 10.0 + step, step)
    for case, workers in WORKERS.items():
        for worker in workers:
            add_worker(root, case, worker, TRACES / case / f"{worker}.trace.json.gz")
    for case in LOADERS:
        record_loading(root / "recorded.json", case)
        add_worker(root, case, "rank0", root / "recorded.json")
    record_modules(root / "recorded.json")
    add_worker(root, "modules", "rank0", root / "recorded.json")
    return root


def add_worker(root, case, worker, trace):
    folder = root / run_name(case)
    folder.mkdir(parents=True, exist_ok=True)
    for canonical in (folder / f"{worker}.trace.json.gz", folder.parent / f"{worker}.trace.json.gz"):
        canonical.write_bytes(trace.read_bytes() if trace.suffix == ".gz" else gzip.compress(trace.read_bytes()))
    write_plugin_copy(trace, folder / f"{worker}.pt.trace.json.gz")


def record_loading(path, case):
    """Three steps whose fetch is marked as our callbacks do, and sorts enough numbers to take its time."""

    def numbers():
        return (torch.rand(200_000).sort().values for _ in range(4))

    batches = iter(DataLoader(list(numbers()), batch_size=1) if case == "torch_loader" else numbers())
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(4):
            with record_function("forge.data"):
                batch = next(batches)
            with record_function("my_region"):
                batch.square().sum()
            profiler.step()


def record_modules(path):
    """A checkpointed layer and a gradient penalty, with Python stacks, which bring the modules along."""
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
    batch = torch.rand(4, 8, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], with_stack=True, with_modules=True) as profiler:
        loss = checkpoint(layers[1], layers[0](batch), use_reentrant=True).square().mean()
        loss.backward(retain_graph=True)
        [gradient] = torch.autograd.grad(layers[0](batch).square().mean(), batch, create_graph=True)
        gradient.square().sum().backward()
    profiler.export_chrome_trace(str(path))


@pytest.fixture(scope="module")
def board(logdir):
    with tensorboard_server(logdir) as board:
        board.profiler_runs(at_least=len(CASES))
        yield board


def events_of(root, case, worker):
    """The events of the canonical trace."""
    content = (root / "version_0" / case / f"{worker}.trace.json.gz").read_bytes()
    return json.loads(gzip.decompress(content))["traceEvents"]


def average(overview, part):
    [total] = overview["performance"]
    [value] = [child["value"] for child in total["children"] if child["name"] == part]
    return value


def test_the_tab_lists_each_folder_with_copies_and_nothing_else(board):
    assert board.profiler_runs() == sorted(run_name(case) for case in CASES)
    for case, workers in WORKERS.items():
        assert board.workers(run_name(case)) == workers
    assert board.workers(run_name("ddp_comm_bound"), "Distributed") == ["All"]


def test_the_scalars_are_in_the_same_tensorboard(board):
    assert list(board.scalar_tags(["time/step_ms"])["version_0"]) == ["time/step_ms"]
    assert board.scalars("version_0", "time/step_ms", at_least=3) == [(0, 10.0), (1, 11.0), (2, 12.0)]


@EACH_WORKER
def test_each_recorded_step_is_one_step(board, logdir, case, worker):
    overview = board.profile("overview", run_name(case), worker)

    recorded = sorted(
        event["name"].removeprefix("ProfilerStep#")
        for event in events_of(logdir, case, worker)
        if event.get("cat") == "user_annotation" and event["name"].startswith("ProfilerStep#")
    )
    assert len(recorded) == 3
    assert [row[0] for row in overview["steps"]["rows"]] == recorded


@EACH_WORKER
def test_data_loading_takes_the_time_it_took(board, logdir, case, worker):
    overview = board.profile("overview", run_name(case), worker)

    fetches = [
        event["dur"]
        for event in events_of(logdir, case, worker)
        if event.get("cat") == "user_annotation" and event["name"].startswith("enumerate(DataLoader)#")
    ]
    assert len(fetches) == 3
    assert average(overview, "DataLoader") == pytest.approx(sum(fetches) / 3, rel=0.05)


@pytest.mark.parametrize("case", LOADERS)
def test_the_fetch_our_callbacks_mark_counts_once_whatever_loads_the_data(board, logdir, case):
    overview = board.profile("overview", run_name(case), "rank0")

    events = events_of(logdir, case, "rank0")
    fetches = [event["dur"] for event in events if event["name"] == "forge.data"]
    assert len(fetches) == 3
    assert sum(event["name"].startswith("enumerate(DataLoader)#") for event in events) == (
        3 if case == "torch_loader" else 0
    )
    assert average(overview, "DataLoader") == pytest.approx(sum(fetches) / 3, rel=0.05)


def test_a_region_of_the_user_is_an_operator_and_the_fetch_is_not(board, logdir):
    table = board.profile("operation/table", run_name("other_loader"), "rank0", group_by="Operation")

    rows = {row["name"]: row for row in table["data"]}
    regions = [event["dur"] for event in events_of(logdir, "other_loader", "rank0") if event["name"] == "my_region"]
    assert rows["my_region"]["calls"] == len(regions) == 3
    assert rows["my_region"]["host_total_duration"] == pytest.approx(sum(regions), abs=1)
    assert not [name for name in rows if "forge.data" in name]


@EACH_WORKER
def test_each_operator_has_the_device_time_of_what_it_launched(board, logdir, case, worker):
    """Device self time is that of the kernels, copies and fills launched directly; total adds the nested operators'."""
    table = board.profile("operation/table", run_name(case), worker, group_by="Operation")

    own, total, nested_in_itself = device_time_by_operator(events_of(logdir, case, worker))
    shown = {row["name"]: row for row in table["data"]}
    assert len(own) >= 12
    assert set(own) <= set(shown)
    for name, row in shown.items():
        assert row["device_self_duration"] == pytest.approx(own.get(name, 0.0), abs=1), name
        if name not in nested_in_itself:  # there the plugin counts the inner call again, or not, by circumstances
            assert row["device_total_duration"] == pytest.approx(total.get(name, 0.0), abs=1), name


def device_time_by_operator(events):
    """Microseconds by operator name: launched by it, and launched by it or by what ran within it on its thread."""
    launches = {
        event["args"]["correlation"]: event["args"].get("External id")
        for event in events
        if event.get("cat") in {"cuda_runtime", "cuda_driver"}
    }
    launched = defaultdict(float)
    for event in events:
        if event.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}:
            launched[launches.get(event["args"]["correlation"])] += event["dur"]

    own, total = defaultdict(float), defaultdict(float)
    open_by_thread, nested_in_itself = defaultdict(list), set()
    for event in sorted(
        (event for event in events if event.get("cat") == "cpu_op"), key=lambda e: (e["ts"], -e["dur"])
    ):
        stack = open_by_thread[event["tid"]]
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
            stack.pop()
        if event["name"] in {enclosing["name"] for enclosing in stack}:
            nested_in_itself.add(event["name"])
        stack.append(event)
        micros = launched[event["args"]["External id"]]
        if micros:
            own[event["name"]] += micros
            for enclosing in stack:
                total[enclosing["name"]] += micros
    return own, total, nested_in_itself


def test_recorded_modules_cost_no_operators(board, logdir):
    """With fwdbwd renamed as well the plugin moves backward passes under modules, and loses some or fails to load."""
    table = board.profile("operation/table", run_name("modules"), "rank0", group_by="Operation")

    events = events_of(logdir, "modules", "rank0")
    assert [event for event in events if "Python module id" in event.get("args", {})]
    assert [event for event in events if event.get("cat") == "fwdbwd"]
    for operator in ("aten::mm", "aten::addmm"):
        [row] = [row for row in table["data"] if row["name"] == operator]
        assert row["calls"] == sum(event["name"] == operator for event in events) > 2


@EACH_WORKER
def test_each_kernel_has_its_time(board, logdir, case, worker):
    table = board.profile("kernel/table", run_name(case), worker, group_by="Kernel")["data"]

    expected = defaultdict(float)
    for event in events_of(logdir, case, worker):
        if event.get("cat") == "kernel":
            expected[event["name"]] += event["dur"]
    columns = [column["name"] for column in table["columns"]]
    name, micros = columns.index("Name"), columns.index("Total Duration (us)")
    assert {row[name]: row[micros] for row in table["rows"]} == pytest.approx(dict(expected), abs=1)


@pytest.fixture(scope="module")
def raw_board(tmp_path_factory):
    root = tmp_path_factory.mktemp("raw")
    shutil.copy(TRACES / "input_bound" / "rank0.trace.json.gz", root / "rank0.pt.trace.json.gz")
    with tensorboard_server(root) as board:
        [run] = board.profiler_runs()
        yield board, run


def test_without_the_copy_the_numbers_are_wrong_as_documented(raw_board):
    board, run = raw_board
    overview = board.profile("overview", run, "rank0")
    table = board.profile("operation/table", run, "rank0", group_by="Operation")

    assert [row[0] for row in overview["steps"]["rows"]] == ["12", "12", "13", "13", "14", "14"]
    assert average(overview, "DataLoader") == 0
    assert {row["device_total_duration"] for row in table["data"]} == {0}


@pytest.mark.browser
def test_the_page_offers_the_runs_and_the_workers(board):
    """The selectors only: every view waits for a script from the internet before it shows anything."""
    case = "ddp_comm_bound"
    with chromium() as browser:
        browser.get(f"{board.url}#pytorch_profiler")
        [frame] = wait_until(lambda: browser.find_elements(By.TAG_NAME, "iframe"), "the page has the tab's frame")
        browser.switch_to.frame(frame)

        def selected():
            boxes = browser.find_elements(By.CSS_SELECTOR, "[role=button][aria-haspopup=listbox]")
            return [box.text for box in boxes if box.is_displayed()]

        def choose(position, option):
            boxes = browser.find_elements(By.CSS_SELECTOR, "[role=button][aria-haspopup=listbox]")
            boxes[position].click()
            options = wait_until(lambda: browser.find_elements(By.CSS_SELECTOR, "[role=option]"), "the list opens")
            texts = [item.get_property("textContent") for item in options]
            options[texts.index(option)].click()
            wait_until(lambda: not browser.find_elements(By.CSS_SELECTOR, "[role=option]"), "the list closes")
            return texts

        first = min(run_name(name) for name in CASES)
        wait_until(lambda: selected() == [first, "Overview", "rank0"], "the first run is selected")
        assert choose(0, run_name("launch_bound")) == board.profiler_runs()
        wait_until(lambda: selected() == [run_name("launch_bound"), "Overview", "rank0"], "the run is selected")
        choose(0, run_name(case))
        wait_until(lambda: selected() == [run_name(case), "Overview", "rank0"], "the run is selected")
        assert choose(2, "rank1") == ["rank0", "rank1"]
        wait_until(lambda: selected()[2] == "rank1", "the worker is selected")
