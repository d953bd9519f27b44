"""The run's record: JSON lines that each rank writes while it trains, and what reads them."""
