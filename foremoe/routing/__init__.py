"""Routing of tokens that was recorded during rollout."""

from foremoe.routing.trace import RoutingTrace

__all__ = ["RoutingTrace"]
