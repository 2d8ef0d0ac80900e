"""Synthetic routing, generated either as counts for many ranks at once or as whole sequences of tokens."""

from foremoe.synthetic.counts import Regime, synthetic_workload
from foremoe.synthetic.imbalance import IMBALANCES, imbalance_workload
from foremoe.synthetic.tokens import synthetic_trace

__all__ = ["IMBALANCES", "Regime", "imbalance_workload", "synthetic_trace", "synthetic_workload"]
