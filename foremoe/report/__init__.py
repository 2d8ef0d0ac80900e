"""The report, which is a self-contained HTML page about a plan."""

from foremoe.report.job import JobPart, plan_job
from foremoe.report.writing import write_job_report, write_report

__all__ = ["JobPart", "plan_job", "write_job_report", "write_report"]
