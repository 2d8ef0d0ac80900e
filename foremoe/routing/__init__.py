"""Routing of tokens, as rollout recorded it."""

from foremoe.routing.trace import RoutingTrace

__all__ = ["RoutingTrace"]
