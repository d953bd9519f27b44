from .page import write_reports as write_reports
