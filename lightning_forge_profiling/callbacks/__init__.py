"""Adapters of a run: Lightning's callbacks and loops without a Trainer; the only folder that knows Lightning."""
