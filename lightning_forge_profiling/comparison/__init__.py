"""Comparison of runs, traces and benchmark results: sources of samples, one ratio with its interval, one gate."""
