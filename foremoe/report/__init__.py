"""Report: one self-contained HTML page of a plan, for people."""

from foremoe.report.redundancy import what_if as what_if
from foremoe.report.writing import write_report as write_report
