"""The data model of `summary.json`: frozen dataclasses that every report is made from."""
