"""One run, whatever drives it: its phases, steps, windows, samples, record and results. Knows no Trainer."""
