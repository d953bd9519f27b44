"""Watching and locking a GPU's clock, against a simulated NVML. No real clock is ever changed here."""

import signal
import subprocess
import sys
import textwrap
import threading
from itertools import count
from pathlib import Path

import pytest

from lightning_forge_profiling.errors import ClocksUnavailableError, ConfigurationError
from lightning_forge_profiling.gpu.clocks import ClockReading, ClockWatch, locked_clocks
from lightning_forge_profiling.gpu.clocks import throttled_samples as throttled
from lightning_forge_profiling.gpu.nvml import find_device, open_nvml
from tests.fake_nvml import FUNCTION_NOT_FOUND, GPU_IS_LOST, NO_PERMISSION, NOT_SUPPORTED, UNKNOWN, FakeBoard, FakeNvml

pytestmark = pytest.mark.usefixtures("_signals_act")

UUID = FakeBoard().uuid
OTHER = "GPU-1d9f0b0c-5a55-4e0a-9f0e-93cf7c1e2c11"
SLICE = "MIG-c7b2a1de-6c41-5ce3-b84e-8f0a4f1b7a01"
LOCK, UNLOCK = "nvmlDeviceSetGpuLockedClocks", "nvmlDeviceResetGpuLockedClocks"


def opened(*boards):
    nvml = FakeNvml(*boards)
    nvml.nvmlInit()
    return nvml


@pytest.fixture
def nvml():
    return opened()


def changes(nvml):
    """How often the clock was locked, and let go."""
    return nvml.asked[LOCK], nvml.asked[UNLOCK]


# -- locking ---------------------------------------------------------------------------------------------------------


def test_the_clock_is_locked_inside_and_let_go_after(nvml):
    with locked_clocks(1500, uuid=UUID, nvml=nvml) as rate:
        assert (rate, nvml.boards[0].lock) == (1500, (1500, 1500))
    assert (nvml.boards[0].lock, changes(nvml), nvml.opened) == (None, (1, 1), 0)


def test_without_a_rate_it_is_the_one_the_maker_rates_the_part_at(nvml):
    with locked_clocks(uuid=UUID, nvml=nvml) as rate:
        assert rate == 1830


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_the_clock_is_let_go_after_any_exception(nvml, error):
    with pytest.raises(error), locked_clocks(1500, uuid=UUID, nvml=nvml):
        raise error
    assert (nvml.boards[0].lock, nvml.opened) == (None, 0)


@pytest.mark.parametrize("rate", [0, -5, 1500.0, "1500", True])
def test_what_is_no_rate_is_refused_before_nvml_sees_it(nvml, rate):
    with pytest.raises(ConfigurationError, match="MHz, such as 1500"), locked_clocks(rate, uuid=UUID, nvml=nvml):
        pytest.fail("the block must not run")
    assert not nvml.asked[LOCK]


def test_only_the_gpu_that_was_named_is_locked():
    nvml = opened(FakeBoard(UUID), FakeBoard(OTHER))
    with locked_clocks(1500, uuid=OTHER, nvml=nvml):
        assert [board.lock for board in nvml.boards] == [None, (1500, 1500)]


def test_a_slice_locks_the_gpu_that_it_is_of(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # which does not matter where the device is named
    nvml = opened(FakeBoard(OTHER), FakeBoard(UUID, slices=[FakeBoard(SLICE)]))
    with locked_clocks(1500, uuid=SLICE, nvml=nvml):
        assert [board.lock for board in nvml.boards] == [None, (1500, 1500)]
    assert nvml.boards[1].lock is None


def test_without_permission_it_says_what_to_do_and_changes_nothing(nvml):
    nvml.fails[LOCK] = NO_PERMISSION
    with pytest.raises(ClocksUnavailableError, match="root"), locked_clocks(1500, uuid=UUID, nvml=nvml):
        pytest.fail("the block must not run")
    assert (changes(nvml), nvml.opened) == ((1, 0), 0)


@pytest.mark.parametrize("reset", [None, NOT_SUPPORTED])
def test_a_lock_that_fails_half_way_is_taken_back(nvml, reset):
    nvml.fails[LOCK] = UNKNOWN
    if reset is not None:
        nvml.fails[UNLOCK] = reset
    with pytest.raises(ClocksUnavailableError, match=r"not locked at 1500 MHz.*SUPPORTED_CLOCKS"):
        locked_clocks(1500, uuid=UUID, nvml=nvml).__enter__()
    assert (changes(nvml), nvml.opened) == ((1, 1), 0)


def test_a_gpu_of_unknown_rated_clock_needs_a_rate(nvml):
    nvml.fails["nvmlDeviceGetDefaultApplicationsClock"] = NOT_SUPPORTED
    with pytest.raises(ClocksUnavailableError, match=r"locked_clocks\(sm_mhz"), locked_clocks(uuid=UUID, nvml=nvml):
        pytest.fail("the block must not run")
    assert changes(nvml) == (0, 0)


def test_a_gpu_that_nvml_does_not_know_is_left_alone(nvml):
    with pytest.raises(ClocksUnavailableError, match="not locked"), locked_clocks(1500, uuid="other", nvml=nvml):
        pytest.fail("the block must not run")
    assert (changes(nvml), nvml.opened) == ((0, 0), 0)


@pytest.mark.parametrize("device", ["cpu", "cuda:99", 99])
def test_a_device_that_is_no_gpu_here_is_refused(nvml, device):
    with pytest.raises(ClocksUnavailableError, match="not one of the"), locked_clocks(1500, device=device, nvml=nvml):
        pytest.fail("the block must not run")
    assert (changes(nvml), nvml.opened) == ((0, 0), 0)


@pytest.mark.parametrize("device", ["foo", "", "cuda:-1", "cuda:256", 256, -1, 1.5, True, b"cuda"])
def test_what_is_no_device_is_refused_before_nvml_sees_it(monkeypatch, device):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ConfigurationError, match="device must be a GPU as PyTorch names it"):
        locked_clocks(1500, device=device).__enter__()


def test_an_error_of_unlocking_names_the_command_that_does_it(nvml):
    nvml.fails[UNLOCK] = UNKNOWN
    with pytest.raises(ClocksUnavailableError, match="nvidia-smi -rgc"), locked_clocks(1500, uuid=UUID, nvml=nvml):
        pass
    assert nvml.opened == 0


def test_a_second_lock_on_the_same_gpu_is_refused_and_the_first_stays(nvml):
    with locked_clocks(1500, uuid=UUID, nvml=nvml):
        again = opened(*nvml.boards)
        with pytest.raises(ClocksUnavailableError, match="holds it already"):
            locked_clocks(1200, uuid=UUID, nvml=again).__enter__()
        assert nvml.boards[0].lock == (1500, 1500)
    with locked_clocks(1200, uuid=UUID, nvml=again):  # and it can be locked again afterwards
        assert nvml.boards[0].lock == (1200, 1200)


def test_in_a_thread_it_is_locked_and_let_go_too(nvml):
    seen = []

    def work():
        with locked_clocks(1500, uuid=UUID, nvml=nvml):
            seen.append(nvml.boards[0].lock)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (seen, nvml.boards[0].lock) == ([(1500, 1500)], None)


@pytest.mark.linux
def test_the_users_signal_handler_stays_in_place(nvml):
    def own(number, frame):
        raise AssertionError

    before = signal.signal(signal.SIGTERM, own)
    try:
        with locked_clocks(1500, uuid=UUID, nvml=nvml):
            assert signal.getsignal(signal.SIGTERM) is own
            assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_blocks_that_end_in_another_order_leave_the_handler_with_the_last():
    nvml = opened(FakeBoard(UUID), FakeBoard(OTHER))
    nvml.nvmlInit()
    first, second = (locked_clocks(1500, uuid=uuid, nvml=nvml) for uuid in (UUID, OTHER))
    first.__enter__()
    second.__enter__()
    handler = signal.getsignal(signal.SIGTERM)
    assert handler is not signal.SIG_DFL
    first.__exit__(None, None, None)
    assert [board.lock for board in nvml.boards] == [None, (1500, 1500)]
    assert signal.getsignal(signal.SIGTERM) is handler
    second.__exit__(None, None, None)
    assert [board.lock for board in nvml.boards] == [None, None]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def run(tmp_path, program):
    """A process in which `held` is a lock whose end is written down. Its return code, and what was written."""
    log = tmp_path / "calls"
    start = textwrap.dedent(f"""
        import os, signal, sys
        from lightning_forge_profiling.gpu.clocks import locked_clocks
        from tests.test_clocks import UUID, opened

        nvml = opened()
        def unlock(handle):
            with open({str(log)!r}, "a") as file:
                print("unlocked", file=file)
        nvml.nvmlDeviceResetGpuLockedClocks = unlock
        held = locked_clocks(1500, uuid=UUID, nvml=nvml)
    """)
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(program)], cwd=root, capture_output=True, text=True, check=False
    )
    return done.returncode, log.read_text().split() if log.exists() else [], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("with held:\n    os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("held.__enter__()\nos.kill(os.getpid(), signal.SIGHUP)", -signal.SIGHUP),
        ("held.__enter__()\nsys.exit(3)", 3),
        ("held.__enter__()\nraise ValueError", 1),
    ],
)
def test_the_clock_is_let_go_however_the_process_ends(tmp_path, program, status):
    code, written, stderr = run(tmp_path, program)
    assert (code, written) == (status, ["unlocked"]), stderr


@pytest.mark.parametrize("end", ["", "first.__exit__(None, None, None)", "second.__exit__(None, None, None)"])
def test_a_signal_lets_go_of_every_clock_that_is_held(tmp_path, end):
    program = f"""
        from tests.fake_nvml import FakeBoard
        from tests.test_clocks import OTHER
        nvml = opened(FakeBoard(UUID), FakeBoard(OTHER))
        nvml.nvmlInit()
        def unlock(handle, real=nvml.nvmlDeviceResetGpuLockedClocks):
            real(handle)
            with open({str(tmp_path / "calls")!r}, "w") as file:
                print(*[board.lock for board in nvml.boards], file=file)
        nvml.nvmlDeviceResetGpuLockedClocks = unlock
        first, second = (locked_clocks(1500, uuid=uuid, nvml=nvml) for uuid in (UUID, OTHER))
        first.__enter__()
        second.__enter__()
        {end}
        os.kill(os.getpid(), signal.SIGTERM)
    """
    code, written, stderr = run(tmp_path, program)
    assert (code, written) == (-signal.SIGTERM, ["None", "None"]), stderr


def test_a_signal_while_the_clock_is_let_go_does_not_leave_it_locked(tmp_path):
    program = """
        def late(handle, unlock=nvml.nvmlDeviceResetGpuLockedClocks):
            nvml.nvmlDeviceResetGpuLockedClocks = unlock
            os.kill(os.getpid(), signal.SIGTERM)
            unlock(handle)
        nvml.nvmlDeviceResetGpuLockedClocks = late
        with held:
            pass
    """
    assert run(tmp_path, program)[:2] == (-signal.SIGTERM, ["unlocked"])


@pytest.mark.parametrize("end", ["sys.exit(0)", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_the_end_of_a_forked_child_does_not_let_go_of_the_parents_clock(tmp_path, end):
    program = f"""
        with held:
            if child := os.fork():
                status = os.waitpid(child, 0)[1]
                written = os.path.exists({str(tmp_path / "calls")!r})
            else:
                {end}
        if child:
            sys.exit(7 if written else 0)
    """
    assert run(tmp_path, program)[:2] == (0, ["unlocked"])


def test_an_error_of_unlocking_on_a_signal_is_printed_before_the_end(tmp_path):
    program = """
        def unlock(handle):
            raise nvml.NVMLError(999)
        nvml.nvmlDeviceResetGpuLockedClocks = unlock
        with held:
            os.kill(os.getpid(), signal.SIGTERM)
    """
    code, _, stderr = run(tmp_path, program)
    assert code == -signal.SIGTERM
    assert "nvidia-smi -rgc" in stderr


def test_without_nvml_the_message_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ClocksUnavailableError, match="nvidia-ml-py"):
        ClockWatch(uuid=UUID)
    with pytest.raises(ClocksUnavailableError, match="nvidia-ml-py"), locked_clocks(1500, uuid=UUID):
        pytest.fail("the block must not run")


# -- watching --------------------------------------------------------------------------------------------------------


def test_the_clock_is_read_once_in_five_milliseconds(nvml):
    now = [0]
    with ClockWatch(uuid=UUID, nvml=nvml, clock_ns=lambda: now[0]) as watch:
        nvml.asked.clear()
        for number in range(100):
            now[0] += 1_000_000
            watch.read(number)
        assert 19 <= nvml.asked["nvmlDeviceGetClockInfo"] <= 21
    assert nvml.opened == 0


@pytest.mark.parametrize("visible", [None, "1", SLICE])
def test_the_clock_that_is_read_is_that_of_the_device_that_cuda_means(monkeypatch, visible):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = opened(FakeBoard(OTHER), FakeBoard(UUID, slices=[FakeBoard(SLICE)]))
    nvml.boards[1].max_mhz = 1755
    with ClockWatch(UUID, 0, nvml=nvml) as watch:
        watch.read(0)
        seen = watch.summary(0)
    assert seen is not None
    assert seen.limit_mhz == 1755


def test_the_summary_of_the_clock(nvml):
    now = [0]
    watch = ClockWatch(uuid=UUID, nvml=nvml, clock_ns=lambda: now[0])
    assert watch.summary(0) is None
    for number, (rate, reasons) in enumerate([(1980, 1), (1980, 0), (1700, 0x4)]):
        nvml.boards[0].sm_mhz, nvml.boards[0].reasons = rate, reasons
        now[0] += 10_000_000
        watch.read(number)
    seen = watch.summary(2)
    assert str(seen) == "SM clock 1980 MHz (1700 to 1980, of 1980), held down by power cap"
    assert watch.throttled(4) == [False, True, True, True]


def test_a_driver_that_knows_the_reasons_by_their_old_name_only_is_asked_by_that(nvml):
    nvml.fails["nvmlDeviceGetCurrentClocksEventReasons"] = FUNCTION_NOT_FOUND
    nvml.boards[0].reasons = 0x20
    with ClockWatch(uuid=UUID, nvml=nvml) as watch:
        watch.read(0)
        seen = watch.summary(0)
    assert seen is not None
    assert seen.reasons == ("temperature",)


def test_a_clock_that_cannot_be_read_is_a_clear_error(nvml):
    nvml.fails["nvmlDeviceGetClockInfo"] = NOT_SUPPORTED
    with pytest.raises(ClocksUnavailableError, match="cannot be read"):
        ClockWatch(uuid=UUID, nvml=nvml)
    assert nvml.opened == 0


def test_a_reading_that_fails_later_is_a_reading_less(nvml):
    now = [0]
    watch = ClockWatch(uuid=UUID, nvml=nvml, clock_ns=lambda: now[0])
    watch.read(0)
    nvml.fails["nvmlDeviceGetClockInfo"] = GPU_IS_LOST
    now[0] += 10_000_000
    watch.read(5)
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


@pytest.mark.gpu
def test_a_real_driver_has_every_function_that_is_called_and_its_clock_can_be_watched():
    import torch  # noqa: PLC0415  (slow, and only this test needs it)

    nvml = open_nvml()
    try:
        for name in (LOCK, UNLOCK, "nvmlDeviceGetDefaultApplicationsClock"):
            assert callable(getattr(nvml, name))  # asked for, never called
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        assert find_device(nvml, uuid, 0).uuid == find_device(nvml, f"GPU-{uuid}").uuid
    finally:
        nvml.nvmlShutdown()
    with ClockWatch(uuid, 0) as watch:
        watch.read(0)
        seen = watch.summary(0)
    assert seen is not None
    assert 0 < seen.median_mhz <= seen.limit_mhz


def test_the_median_is_that_of_the_samples_that_were_kept():
    board = FakeBoard()
    ticks = count(0, 10_000_000)
    watch = ClockWatch(board.uuid, nvml=FakeNvml(board), clock_ns=lambda: next(ticks))
    for mark, (rate, reasons) in enumerate([(1980, 0)] + [(1200, 0x4)] * 4):
        board.sm_mhz, board.reasons = rate, reasons
        watch.read(mark)
    assert watch.summary(discarded=0).median_mhz == 1200
    assert watch.summary(discarded=3).median_mhz == 1980
    assert watch.summary(discarded=3).min_mhz == 1200
