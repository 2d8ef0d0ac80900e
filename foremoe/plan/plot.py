"""Picture of a plan: the skew of every row as a map, without and with the plan."""

from typing import Any

from foremoe.base.errors import InputError
from foremoe.plan.plan import Plan
from foremoe.plan.text import static_load_MLG
from foremoe.workload.skew import mean_skew, skew

_WIDTH_INCHES, _HEIGHT_INCHES = 10.0, 3.0


def skew_maps(plan: Plan) -> Any:
    """Draws two maps of micro-steps and layers on one scale of colours, and returns the matplotlib figure.

    Raises:
        InputError: matplotlib is missing.
    """
    try:
        from matplotlib import pyplot
    except ImportError:
        raise InputError("Plan.plot needs matplotlib; pip install matplotlib.") from None
    load_MLG = static_load_MLG(plan)
    panels = (
        ("static", skew(load_MLG), mean_skew(load_MLG.reshape(plan.N, plan.G))),
        ("planned", plan.skew_ML, plan.skew_mean),
    )
    most = max(float(skew_ML.max()) for _, skew_ML, _ in panels)
    figure, axes = pyplot.subplots(1, 2, figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), sharey=True, layout="constrained")
    for axis, (name, skew_ML, mean) in zip(axes, panels, strict=True):
        image = axis.imshow(skew_ML, vmin=1.0, vmax=max(most, 1.01), cmap="YlOrRd", aspect="auto")
        axis.set_title(f"{name}: skew {mean:.3f} on average, {skew_ML.max():.2f} at most")
        axis.set_xlabel("layer")
        axis.locator_params(integer=True)
    axes[0].set_ylabel("micro-step")
    figure.colorbar(image, ax=axes, label="largest / mean rank load")
    pyplot.close(figure)  # a notebook shows the returned figure, and would show an open one again
    return figure
