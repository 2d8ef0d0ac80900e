"""Calibration of the cost model's constants by measurements on this machine. See docs/calibration.md.

The package can be imported without torch, but measurements require torch.
"""

from foremoe.calibrate.case import Case
from foremoe.calibrate.fitting import Fit, fit
from foremoe.calibrate.gate import Constant, Fault
from foremoe.calibrate.link_fits import BackendFit
from foremoe.calibrate.points import Measured, Point

__all__ = ["BackendFit", "Case", "Constant", "Fault", "Fit", "Measured", "Point", "fit"]
