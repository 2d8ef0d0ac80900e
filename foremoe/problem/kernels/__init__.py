"""Compiled functions that compute prices and bounds."""
