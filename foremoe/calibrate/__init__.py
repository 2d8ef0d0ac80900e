"""Calibration: the constants of the cost model, measured on the machine at hand. See docs/calibration.md.

Importing this needs no torch; measuring does.
"""

from foremoe.calibrate.case import Case as Case
from foremoe.calibrate.fitting import Constant as Constant
from foremoe.calibrate.fitting import Fit as Fit
from foremoe.calibrate.fitting import fit as fit
from foremoe.calibrate.points import Measured as Measured
from foremoe.calibrate.points import Point as Point
