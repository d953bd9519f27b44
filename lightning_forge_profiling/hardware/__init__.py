"""What a device is and can do."""
