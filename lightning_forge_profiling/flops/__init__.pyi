from .precision import measure_peak as measure_peak
