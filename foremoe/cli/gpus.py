"""Options of jobs whose layers are split over pipeline ranks."""

import dataclasses

from foremoe.base.errors import InputError
from foremoe.cli.options import COUNT, RANKS, CaseOptions, option

OF_ALL_LAYERS = (None, "accumulate", "accumulate+reforward")  # schedules without a pipeline

gpus_option = option(
    "--gpus",
    type=RANKS,
    help="Number of GPUs of the whole job, EP x DP x PP. EP groups of --ranks share them.  [default: those of one EP group]",
)

pp_option = option("--pp", type=COUNT, default=1, help="Number of pipeline ranks over which the layers are split.")
vpp_option = option("--vpp", type=COUNT, default=1, help="Number of chunks per pipeline rank (interleaved schedule).")


def on_gpus(options: CaseOptions, gpus: int | None, pp: int, vpp: int) -> tuple[CaseOptions, int]:
    """Returns the options of one EP group of a job on `gpus` GPUs (or on those of one group), and the number of EP groups.

    Raises:
        InputError: GPUs or schedule do not suit the pipeline.
    """
    if pp * vpp > 1 and options.schedule not in OF_ALL_LAYERS:
        cure = "leave --schedule out, or give accumulate+reforward if activations are recomputed"
        raise InputError(f"--pp makes the schedule of every pipeline rank itself; {cure}.")
    if gpus is None:
        return dataclasses.replace(options, pp=pp), 1
    given, ranks = options.trainer.data_parallel, options.ranks
    unit = pp * (ranks or given or 1)
    if gpus % unit:
        sizes = f"PP {pp} x " + (f"DP {given or 1}" if ranks is None else f"EP {ranks}")
        raise InputError(f"{gpus} GPUs do not divide by {sizes}; give --gpus a multiple of {unit}.")
    groups = given or 1 if ranks is None else gpus // unit
    if given not in (None, groups):
        raise InputError(f"{gpus} GPUs are {groups} EP groups of {ranks} x PP {pp}; leave --data-parallel {given} out.")
    trainer = dataclasses.replace(options.trainer, data_parallel=groups)
    return dataclasses.replace(options, ranks=gpus // (pp * groups), pp=pp, trainer=trainer), groups


def layout_words(ep: int, data_parallel: int, pp: int) -> str:
    """Returns the layout of a job in words."""
    return f"{ep * data_parallel * pp} GPUs = EP {ep} x DP {data_parallel} x PP {pp}"
