"""Recording: one window of steps with `torch.profiler`, from its schedule to the exported trace."""
