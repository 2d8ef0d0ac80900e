"""Calibration: the constants of the cost model, measured on this machine. See docs/calibration.md.

Importing the package does not need torch; measuring does.
"""

from foremoe.calibrate.case import Case
from foremoe.calibrate.fitting import Fit, fit
from foremoe.calibrate.gate import Constant, Fault
from foremoe.calibrate.link_fits import BackendFit
from foremoe.calibrate.points import Measured, Point

__all__ = ["BackendFit", "Case", "Constant", "Fault", "Fit", "Measured", "Point", "fit"]
