"""Report: one self-contained HTML page of a plan, for people."""

from foremoe.report.redundancy import what_if
from foremoe.report.writing import write_report

__all__ = ["what_if", "write_report"]
