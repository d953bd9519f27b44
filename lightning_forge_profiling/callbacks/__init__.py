"""The Lightning callbacks; the only folder that knows Lightning."""
