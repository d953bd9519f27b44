"""The allocator's figures by interval, without touching the user's peak."""

from itertools import pairwise

import pytest

from lightning_forge_profiling.gpu.memory import AllocatorReading, read_allocator

MIB = 2**20


def reading(allocated=0, peak=0, **counters):
    return AllocatorReading(allocated_bytes=allocated, reserved_bytes=2 * peak, peak_bytes=peak, **counters)


def test_a_peak_that_rose_is_the_intervals():
    assert reading(allocated=12, peak=90).since(reading(allocated=10, peak=40), sampled_bytes=70).peak_bytes == 90


def test_a_peak_that_did_not_rise_is_at_least_the_highest_known_value():
    before, after = reading(allocated=10, peak=90), reading(allocated=20, peak=90)
    assert after.since(before, sampled_bytes=55).peak_bytes == 55
    assert after.since(before).peak_bytes == 20


def test_a_spike_shows_in_its_own_interval_only():
    readings = [reading(10, 40), reading(10, 40), reading(10, 200), reading(10, 200)]
    peaks = [later.since(earlier, sampled_bytes=38).peak_bytes for earlier, later in pairwise(readings)]
    assert peaks == [38, 200, 38]


def test_the_user_resets_the_peak_or_the_counters():
    before, after = reading(10, 90, device_allocs=50, retries=3), reading(10, 60, device_allocs=4, retries=1)
    interval = after.since(before)
    assert (interval.peak_bytes, interval.device_allocs, interval.retries) == (60, 4, 1)


def test_the_counters_are_of_the_interval():
    interval = reading(device_allocs=58, retries=4).since(reading(device_allocs=50, retries=3))
    assert (interval.device_allocs, interval.retries) == (8, 1)


def test_intervals_add_up():
    first = reading(10, 90, device_allocs=3).since(reading(10, 40))
    second = reading(30, 90, device_allocs=10, retries=1).since(reading(30, 90, device_allocs=9), sampled_bytes=50)
    both = first.plus(second)
    assert (both.allocated_bytes, both.reserved_bytes, both.peak_bytes) == (30, 180, 90)
    assert (both.device_allocs, both.retries) == (4, 1), "not the six between the two"
    assert second.plus(first).peak_bytes == 90


def test_before_the_first_allocation_all_is_zero():
    assert read_allocator(0) == AllocatorReading() or read_allocator(0).reserved_bytes > 0
    assert AllocatorReading.of({}) == AllocatorReading()


@pytest.mark.gpu
def test_on_a_gpu_the_figures_are_pytorchs_and_the_users_peak_stays():
    import torch  # noqa: PLC0415  (slow, and the other tests do without)

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    before = read_allocator(0)
    spike = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    del spike
    after = read_allocator(0)
    users = torch.cuda.max_memory_allocated()
    interval = after.since(before)
    assert interval.peak_bytes == users
    assert users == before.allocated_bytes + 512 * MIB
    assert interval.allocated_bytes == torch.cuda.memory_allocated()
    assert interval.device_allocs >= 1
    later = read_allocator(0).since(after)
    assert (later.peak_bytes, later.device_allocs) == (interval.allocated_bytes, 0)
    assert torch.cuda.max_memory_allocated() == users
    del kept
