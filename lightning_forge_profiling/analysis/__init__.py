"""Measuring a trace: steps, busy and idle time, kernels, operators, collectives. Needs neither torch nor Lightning."""
