from .measured_peak import measure_peak as measure_peak
