"""A run's GPU telemetry in words."""

from collections.abc import Iterator

from lightning_forge_profiling.results.telemetry import TelemetrySummary


def telemetry_words(gpu: TelemetrySummary, *, short: bool = False) -> Iterator[str]:
    """The figures that fit in a line; what was not measured is left out.

    Example:
        >>> ", ".join(telemetry_words(TelemetrySummary(device="NVIDIA H200", utilization_pct=93.2, throttled_pct=0.0)))
        '93 % utilized, not throttled'
    """
    if gpu.utilization_pct is not None:
        yield f"{gpu.utilization_pct:.0f} % utilized"
    if gpu.memory_peak_gib is not None and gpu.memory_total_gib is not None:
        tensors = "" if short or gpu.allocated_peak_gib is None else f" ({gpu.allocated_peak_gib:.1f} tensors)"
        yield f"{gpu.memory_peak_gib:.1f} of {gpu.memory_total_gib:.1f} GiB{tensors} at peak"
    if gpu.power_w is not None:
        limit = "" if gpu.power_limit_w is None else f" of {gpu.power_limit_w:.0f}"
        yield f"{gpu.power_w:.0f}{limit} W"
    if gpu.joules_per_sample is not None and not short:
        joules = gpu.joules_per_sample
        yield f"{joules:,.0f} J per sample" if joules >= 1000 else f"{joules:.3g} J per sample"  # noqa: PLR2004
    if gpu.temperature_peak_c is not None and not short:
        yield f"up to {gpu.temperature_peak_c:.0f} °C"
    if gpu.sm_mhz is not None and not short:
        yield f"{gpu.sm_mhz:.0f} MHz"
    if gpu.throttled_pct:
        reasons = sorted(gpu.throttled_by_pct.items(), key=lambda item: -item[1])
        why = ", ".join(f"{reason} {pct:.0f} %" for reason, pct in reasons)
        yield f"throttled {gpu.throttled_pct:.0f} % of the time ({why})"
    elif gpu.throttled_pct is not None:
        yield "not throttled"
