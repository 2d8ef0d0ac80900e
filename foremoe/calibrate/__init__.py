"""Calibration: the constants of the cost model, measured on this machine. See docs/calibration.md.

Importing this needs no torch; measuring does.
"""

from foremoe.calibrate.case import Case
from foremoe.calibrate.fitting import Constant, Fit, fit
from foremoe.calibrate.points import Measured, Point

__all__ = ["Case", "Constant", "Fit", "Measured", "Point", "fit"]
