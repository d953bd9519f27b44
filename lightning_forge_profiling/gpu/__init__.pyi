from .clocks import locked_clocks as locked_clocks
