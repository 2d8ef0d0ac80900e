"""Report: one self-contained HTML page about a plan."""

from foremoe.report.job import JobPart, plan_job
from foremoe.report.redundancy import what_if
from foremoe.report.runs import StageRuns, run_stage
from foremoe.report.writing import write_job_report, write_report

__all__ = ["JobPart", "StageRuns", "plan_job", "run_stage", "what_if", "write_job_report", "write_report"]
