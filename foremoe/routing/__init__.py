"""Routing of tokens, as recorded during rollout."""

from foremoe.routing.trace import RoutingTrace

__all__ = ["RoutingTrace"]
