"""`forge-profiling try`: changes that can be made from outside, each measured in a process of the unchanged script."""
