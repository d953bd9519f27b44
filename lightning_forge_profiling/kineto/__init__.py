"""Reading a `torch.profiler` trace: from a file of any size and origin to columns of events."""
