"""Time: timers, steps, throughput."""
