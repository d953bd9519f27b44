"""Timing one function well."""
