"""Causes: rules that turn the figures of traces and runs into findings and a verdict."""
