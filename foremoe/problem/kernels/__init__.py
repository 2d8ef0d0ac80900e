"""Compiled functions for prices and bounds."""
