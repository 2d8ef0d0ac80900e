"""Options of jobs whose layers are split over pipeline ranks."""

import dataclasses

from foremoe.base.errors import InputError
from foremoe.cli.options import COUNT, RANKS, CaseOptions, option

OF_ALL_LAYERS = (None, "accumulate", "accumulate+reforward")  # schedules without a pipeline

gpus_option = option(
    "--gpus",
    type=RANKS,
    help="Number of GPUs of the whole job, EP x DP x PP. Use it instead of --ranks, which is for one pipeline rank."
    "  [default: --ranks x --pp]",
)

pp_option = option("--pp", type=COUNT, default=1, help="Number of pipeline ranks over which the layers are split.")
vpp_option = option("--vpp", type=COUNT, default=1, help="Number of chunks per pipeline rank (interleaved schedule).")


def on_gpus(options: CaseOptions, gpus: int | None, pp: int, vpp: int, groups: int = 1) -> CaseOptions:
    """Returns the options for a pipeline on `gpus` GPUs. Raises InputError if GPUs or schedule do not suit the pipeline.

    If `groups` EP groups share the GPUs, the options describe one of them.
    """
    if pp * vpp > 1 and options.schedule not in OF_ALL_LAYERS:
        cure = "leave --schedule out, or give accumulate+reforward if activations are recomputed"
        raise InputError(f"--pp makes the schedule of every pipeline rank itself; {cure}.")
    if gpus is None:
        return dataclasses.replace(options, pp=pp)
    if options.ranks is not None:
        raise InputError("--gpus is the size of the whole job, --ranks of one pipeline rank; give one of them.")
    if gpus % (pp * groups):
        of = f" of {groups} EP groups" if groups > 1 else ""
        raise InputError(f"{gpus} GPUs do not divide over {pp} pipeline ranks{of}; give --gpus a multiple of {pp * groups}.")
    return dataclasses.replace(options, ranks=gpus // (pp * groups), pp=pp)


def layout_words(ep: int, data_parallel: int, pp: int) -> str:
    """Returns the layout of a job in words."""
    return f"{ep * data_parallel * pp} GPUs = EP {ep} x DP {data_parallel} x PP {pp}"
