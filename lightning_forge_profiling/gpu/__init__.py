"""What the GPU is doing: NVML sensors, clocks, the allocator."""
