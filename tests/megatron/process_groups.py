"""Megatron's process groups from one program of a rank to the next; no part of foremoe."""

import gc
import weakref

import torch.distributed as dist

_wrapped = weakref.WeakSet()  # chunks of models
_laid_out = {}  # (default group, sizes) -> what Megatron knows of its groups; the last layout alone


def lay_out(layout):
    """Makes Megatron's process groups, or keeps those of the last program where they fit.

    Each group has sockets and threads, and gloo waits without an end where the system refuses it one more: a limit of 1024 open
    files is that of about ten layouts.
    """
    from megatron.core import parallel_state as ps

    key = dist.group.WORLD, layout.tp, layout.pp, layout.vpp, layout.ep
    if key not in _laid_out:
        take_down(ps, ps.destroy_model_parallel)
        ps.initialize_model_parallel(
            layout.tp, layout.pp, virtual_pipeline_model_parallel_size=layout.vpp, expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=1,
        )  # fmt: skip
        _laid_out[key] = {n: v for n, v in vars(ps).items() if n.startswith("_") and n[1] != "_" and not callable(v)}
    vars(ps).update(_laid_out[key])


def wrap(config, options, chunk, **arguments):
    """`chunk` of a model in Megatron's DDP."""
    from megatron.core.distributed import DistributedDataParallel

    wrapped = DistributedDataParallel(config, options, chunk, **arguments)
    _wrapped.add(wrapped)
    return wrapped


def take_down(ps, destroy):
    """Ends Megatron's process groups, after its own `destroy`, and frees what they hold."""
    _laid_out.clear()
    destroy()
    for group in list(dist.distributed_c10d._world.pg_map):  # torch has no public list of them
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    # Gloo closes its sockets when the last reference to the group goes. Modules have some, and live on in what garbage collection
    # does not see: hooks of gradient accumulators, nodes of autograd, a cache of rotary embeddings.
    for module in [module for wrapped in _wrapped for module in wrapped.modules()]:
        vars(module).clear()
    _wrapped.clear()
    gc.collect()
