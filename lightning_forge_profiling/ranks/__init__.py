"""What the ranks of a run tell each other while they train, without a collective, and where one is stalled."""
