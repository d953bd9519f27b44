"""When to record and what to write: the step window and the torch.profiler session."""
