"""A run's GPU telemetry in words."""

from collections.abc import Iterator

from lightning_forge_profiling.results.telemetry import TelemetrySummary

__all__ = ["telemetry_words"]


def telemetry_words(seen: TelemetrySummary) -> Iterator[str]:
    """What a line has room for; what was not measured is left out.

    Args:
        seen: over the steps that count.

    Example:
        >>> ", ".join(telemetry_words(TelemetrySummary(device="NVIDIA H200", utilization_pct=93.2, throttled_pct=0.0)))
        '93 % utilized, not throttled'
    """
    if seen.utilization_pct is not None:
        yield f"{seen.utilization_pct:.0f} % utilized"
    if seen.memory_peak_gib is not None and seen.memory_total_gib is not None:
        tensors = "" if seen.allocated_peak_gib is None else f" ({seen.allocated_peak_gib:.1f} tensors)"
        yield f"peak memory {seen.memory_peak_gib:.1f} of {seen.memory_total_gib:.1f} GiB{tensors}"
    if seen.power_w is not None:
        limit = "" if seen.power_limit_w is None else f" of {seen.power_limit_w:.0f}"
        yield f"{seen.power_w:.0f}{limit} W"
    if seen.joules_per_sample is not None:
        joules = seen.joules_per_sample
        yield f"{joules:,.0f} J per sample" if joules >= 1000 else f"{joules:.3g} J per sample"  # noqa: PLR2004
    if seen.temperature_peak_c is not None:
        yield f"up to {seen.temperature_peak_c:.0f} °C"
    if seen.sm_mhz is not None:
        yield f"{seen.sm_mhz:.0f} MHz"
    if seen.throttled_pct:
        reasons = sorted(seen.throttled_by_pct.items(), key=lambda item: -item[1])
        why = ", ".join(f"{reason} {pct:.0f} %" for reason, pct in reasons)
        yield f"throttled {seen.throttled_pct:.0f} % of the time ({why})"
    elif seen.throttled_pct is not None:
        yield "not throttled"
