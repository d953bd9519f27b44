"""A simulated NVML: boards whose readings are set by hand, and a count of what was asked."""

# ruff: noqa: N802  (the names are NVML's)

import os
from collections import Counter
from types import SimpleNamespace

NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND, GPU_IS_LOST, UNKNOWN = 3, 4, 6, 13, 15, 999


UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"


class FakeNVMLError(Exception):
    def __init__(self, value):
        super().__init__(f"NVML error {value}")
        self.value = value


class FakeBoard:
    def __init__(self, uuid=UUID, name="NVIDIA H200", slices=()):
        self.uuid, self.name = uuid, name
        self.slices = list(slices)
        """The MIG slices, with None for an empty place."""
        for part in self.slices:
            if part is not None:
                part.board = self
        self.board = None
        self.utilization = self.memory_utilization = self.encoder = self.decoder = 0
        self.memory_total, self.memory_used = 141 * 2**30, 2**30
        self.processes = {os.getpid(): 2**29}
        self.milliwatts, self.milliwatt_limit, self.millijoules = 100_000, 700_000, 0
        self.celsius, self.sm_mhz, self.memory_mhz = 40, 1980, 3201
        self.max_mhz, self.rated_mhz, self.lock = 1980, 1830, None
        self.reasons = 0


class FakeNvml:
    """As the module `pynvml`. `fails` maps a function's name to the error it answers with."""

    NVMLError = FakeNVMLError

    def __init__(self, *boards):
        self.boards = boards or (FakeBoard(),)
        self.fails = {}
        self.asked: Counter[str] = Counter()
        self.opened = 0

    def _called(self, name):
        self.asked[name] += 1
        if name in self.fails:
            raise FakeNVMLError(self.fails[name])

    def nvmlInit(self):
        self._called("nvmlInit")
        self.opened += 1

    def nvmlShutdown(self):
        self.opened -= 1

    def nvmlDeviceGetCount(self):
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.boards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        for board in self.boards:
            for device in (board, *board.slices):
                if device is not None and device.uuid == uuid:
                    return device
        raise FakeNVMLError(NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle):
        return handle.uuid

    def nvmlDeviceGetName(self, handle):
        return handle.name

    def nvmlDeviceGetMigMode(self, handle):
        return [int(bool(handle.slices))] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return len(handle.slices)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        if handle.slices[index] is None:
            raise FakeNVMLError(NOT_FOUND)
        return handle.slices[index]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        return handle.board

    def nvmlDeviceGetUtilizationRates(self, handle):
        self._called("nvmlDeviceGetUtilizationRates")
        if handle.board is not None:
            raise FakeNVMLError(NOT_SUPPORTED)
        return SimpleNamespace(gpu=handle.utilization, memory=handle.memory_utilization)

    def nvmlDeviceGetEncoderUtilization(self, handle):
        self._called("nvmlDeviceGetEncoderUtilization")
        return [handle.encoder, 167_000]

    def nvmlDeviceGetDecoderUtilization(self, handle):
        self._called("nvmlDeviceGetDecoderUtilization")
        return [handle.decoder, 167_000]

    def nvmlDeviceGetMemoryInfo(self, handle):
        self._called("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(total=handle.memory_total, used=handle.memory_used)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        self._called("nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in handle.processes.items()]

    def nvmlDeviceGetPowerUsage(self, handle):
        self._called("nvmlDeviceGetPowerUsage")
        return handle.milliwatts

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        self._called("nvmlDeviceGetEnforcedPowerLimit")
        return handle.milliwatt_limit

    def nvmlDeviceGetTemperature(self, handle, sensor):
        self._called("nvmlDeviceGetTemperature")
        return handle.celsius

    def nvmlDeviceGetTemperatureV(self, handle, sensor):
        self._called("nvmlDeviceGetTemperatureV")
        return handle.celsius

    def nvmlDeviceGetClockInfo(self, handle, clock):
        self._called("nvmlDeviceGetClockInfo")
        return {1: handle.sm_mhz, 2: handle.memory_mhz}[clock]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        self._called("nvmlDeviceGetCurrentClocksEventReasons")
        return handle.reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        self._called("nvmlDeviceGetCurrentClocksThrottleReasons")
        return handle.reasons

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        self._called("nvmlDeviceGetTotalEnergyConsumption")
        return handle.millijoules

    def nvmlDeviceGetMaxClockInfo(self, handle, clock):
        self._called("nvmlDeviceGetMaxClockInfo")
        return handle.max_mhz

    def nvmlDeviceGetDefaultApplicationsClock(self, handle, clock):
        self._called("nvmlDeviceGetDefaultApplicationsClock")
        return handle.rated_mhz

    def nvmlDeviceSetGpuLockedClocks(self, handle, low, high):
        self._called("nvmlDeviceSetGpuLockedClocks")
        handle.lock = (low, high)

    def nvmlDeviceResetGpuLockedClocks(self, handle):
        self._called("nvmlDeviceResetGpuLockedClocks")
        handle.lock = None
