"""Compiled functions of the price and the bounds."""
