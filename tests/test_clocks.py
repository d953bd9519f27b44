"""Watching and locking a GPU's clock, against an NVML of paper. No real clock is ever changed here."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lightning_forge_profiling.hardware.clocks import ClockReading, ClocksUnavailableError, ClockWatch, locked_clocks
from lightning_forge_profiling.hardware.clocks import throttled_samples as throttled
from tests.fake_nvml import NOT_SUPPORTED, FakeBoard, FakeNvml

NO_PERMISSION = 4
UUID = FakeBoard().uuid.removeprefix("GPU-")


class ClockNvml(FakeNvml):
    """With the functions that lock."""

    def __init__(self, *boards):
        super().__init__(*boards)
        self.opened = 1
        self.lock = None
        self.calls = []

    def nvmlDeviceGetMaxClockInfo(self, handle, clock):  # noqa: N802
        return 1980

    def nvmlDeviceGetDefaultApplicationsClock(self, handle, clock):  # noqa: N802
        self._called("nvmlDeviceGetDefaultApplicationsClock")
        return 1830

    def nvmlDeviceSetGpuLockedClocks(self, handle, low, high):  # noqa: N802
        self._called("nvmlDeviceSetGpuLockedClocks")
        self.lock = (low, high)
        self.calls.append("lock")

    def nvmlDeviceResetGpuLockedClocks(self, handle):  # noqa: N802
        self.calls.append("unlock")
        self._called("nvmlDeviceResetGpuLockedClocks")
        self.lock = None


@pytest.fixture
def nvml():
    return ClockNvml()


def test_the_clock_is_locked_inside_and_let_go_after(nvml):
    with locked_clocks(1500, uuid=UUID, nvml=nvml) as rate:
        assert (rate, nvml.lock) == (1500, (1500, 1500))
    assert (nvml.lock, nvml.calls, nvml.opened) == (None, ["lock", "unlock"], 0)


def test_without_a_rate_it_is_the_one_the_maker_rates_the_part_at(nvml):
    with locked_clocks(uuid=UUID, nvml=nvml) as rate:
        assert rate == 1830


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_the_clock_is_let_go_after_any_exception(nvml, error):
    with pytest.raises(error), locked_clocks(1500, uuid=UUID, nvml=nvml):
        raise error
    assert (nvml.lock, nvml.opened) == (None, 0)


def test_without_permission_it_says_what_to_do_and_changes_nothing(nvml):
    nvml.fails["nvmlDeviceSetGpuLockedClocks"] = NO_PERMISSION
    with pytest.raises(ClocksUnavailableError, match="root"), locked_clocks(1500, uuid=UUID, nvml=nvml):
        pytest.fail("the block must not run")
    assert (nvml.calls, nvml.opened) == ([], 0)


def test_a_lock_that_fails_half_way_is_taken_back(nvml):
    nvml.fails["nvmlDeviceSetGpuLockedClocks"] = 999
    with pytest.raises(ClocksUnavailableError, match="1500 MHz"), locked_clocks(1500, uuid=UUID, nvml=nvml):
        pytest.fail("the block must not run")
    assert (nvml.calls, nvml.opened) == (["unlock"], 0)


def test_a_gpu_whose_rated_clock_nobody_knows_needs_a_rate(nvml):
    nvml.fails["nvmlDeviceGetDefaultApplicationsClock"] = NOT_SUPPORTED
    with pytest.raises(ClocksUnavailableError, match="sm_mhz"), locked_clocks(uuid=UUID, nvml=nvml):
        pytest.fail("the block must not run")
    assert nvml.calls == []


def test_a_gpu_that_nvml_does_not_know_is_left_alone(nvml):
    with pytest.raises(ClocksUnavailableError, match="not locked"), locked_clocks(1500, uuid="other", nvml=nvml):
        pytest.fail("the block must not run")
    assert nvml.calls == []


def test_a_clock_that_cannot_be_unlocked_is_said_with_the_way_out(nvml):
    nvml.fails["nvmlDeviceResetGpuLockedClocks"] = 999
    with pytest.raises(ClocksUnavailableError, match="nvidia-smi -rgc"), locked_clocks(1500, uuid=UUID, nvml=nvml):
        pass
    assert nvml.opened == 0


@pytest.mark.parametrize(
    ("end", "status"),
    [("os.kill(os.getpid(), signal.SIGTERM)", -15), ("sys.exit(3)", 3), ("raise ValueError", 1)],
)
@pytest.mark.parametrize("entered", ["with held:\n    {end}", "held.__enter__()\n{end}"])
def test_the_clock_is_let_go_however_the_process_ends(tmp_path, end, status, entered):
    log = tmp_path / "calls"
    program = textwrap.dedent(f"""
        import os, signal, sys
        from pathlib import Path
        from lightning_forge_profiling.hardware.clocks import locked_clocks
        from tests.test_clocks import UUID, ClockNvml

        class Logging(ClockNvml):
            def nvmlDeviceResetGpuLockedClocks(self, handle):
                Path({str(log)!r}).write_text("unlocked")

        held = locked_clocks(1500, uuid=UUID, nvml=Logging())
    """) + entered.format(end=end)
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert log.read_text() == "unlocked"


def test_without_nvml_the_message_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ClocksUnavailableError, match="nvidia-ml-py"):
        ClockWatch(UUID)
    with pytest.raises(ClocksUnavailableError, match="nvidia-ml-py"), locked_clocks(1500, uuid=UUID):
        pytest.fail("the block must not run")


def test_the_clock_is_read_once_in_five_milliseconds(nvml):
    now = [0]
    with ClockWatch(UUID, nvml=nvml, clock_ns=lambda: now[0]) as watch:
        nvml.asked.clear()
        for number in range(100):
            now[0] += 1_000_000
            watch.look(number)
        assert 19 <= nvml.asked["nvmlDeviceGetClockInfo"] <= 21
    assert nvml.opened == 0


def test_what_was_seen_of_the_clock(nvml):
    now = [0]
    watch = ClockWatch(UUID, nvml=nvml, clock_ns=lambda: now[0])
    assert watch.seen(0) is None
    for number, (rate, reasons) in enumerate([(1980, 1), (1980, 0), (1700, 0x4)]):
        nvml.boards[0].sm_mhz, nvml.boards[0].reasons = rate, reasons
        now[0] += 10_000_000
        watch.look(number)
    seen = watch.seen(2)
    assert str(seen) == "SM clock 1980 MHz (1700 to 1980, of 1980), held down by power cap"
    assert watch.throttled(4) == [False, True, True, True]


def test_a_clock_that_cannot_be_read_is_a_clear_error(nvml):
    nvml.fails["nvmlDeviceGetClockInfo"] = NOT_SUPPORTED
    with pytest.raises(ClocksUnavailableError, match="cannot be read"):
        ClockWatch(UUID, nvml=nvml)
    assert nvml.opened == 0


def test_a_reading_that_fails_later_is_a_reading_less(nvml):
    now = [0]
    watch = ClockWatch(UUID, nvml=nvml, clock_ns=lambda: now[0])
    watch.look(0)
    nvml.fails["nvmlDeviceGetClockInfo"] = 15
    now[0] += 10_000_000
    watch.look(5)
    assert watch.throttled(5) == [False] * 5


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        ([], [False] * 4),
        ([(0, 1980, 4), (2, 1965, 4)], [False] * 4),  # a step of boost
        ([(0, 1980, 0), (2, 1000, 1), (3, 1980, 0)], [False] * 4),  # idle
        ([(0, 1000, 4), (2, 1980, 0), (3, 1980, 0)], [True, True, False, False]),
        ([(0, 1980, 0), (1, 1980, 0), (2, 1000, 4), (3, 1980, 0)], [False, True, True, False]),
        ([(0, 1000, 4), (2, 1000, 4)], [False] * 4),  # held at one rate throughout
    ],
)
def test_only_samples_beside_a_lowered_reading_are_throttled(readings, expected):
    assert throttled([ClockReading(*reading) for reading in readings], 4) == expected
