"""Artificial routing: counts for many ranks at once, and whole sequences."""

from foremoe.synthetic.counts import Regime, synthetic_workload
from foremoe.synthetic.tokens import synthetic_trace

__all__ = ["Regime", "synthetic_trace", "synthetic_workload"]
