from .files import write_reports as write_reports
