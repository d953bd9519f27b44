"""How long something took: timers, steps, throughput."""
