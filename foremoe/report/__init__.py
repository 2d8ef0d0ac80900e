"""Report: one self-contained HTML page of a plan, for people."""

from foremoe.report.redundancy import what_if
from foremoe.report.runs import StageRuns, run_stage
from foremoe.report.writing import write_report

__all__ = ["StageRuns", "run_stage", "what_if", "write_report"]
