"""The state of the GPU: NVML sensors, clocks, the allocator."""
