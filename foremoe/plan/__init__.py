"""The plan and its parts: placement, quotas, transfers, laws and files."""

from foremoe.plan.eplb_maps import EplbMaps
from foremoe.plan.header import PlanHeader, PlanKey
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import Link, TransferList

__all__ = ["EplbMaps", "Link", "Plan", "PlanHeader", "PlanKey", "TransferList"]
