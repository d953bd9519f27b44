"""The run's record: JSON lines that each rank writes during training, and their readers."""
