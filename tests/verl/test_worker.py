"""veRL's own worker takes what the engine says: it flattens and reduces metrics over mini-batches and data-parallel ranks."""

import needs_verl  # noqa: F401, I001 (skips where veRL is missing, so it comes first)

import types

import pytest
from program import Layout

from foremoe.integrations.verl.settings import Settings

LAYOUT = Layout(ep=2)


def work(_group, settings):
    """Metrics of a recompute and of an update by `TrainingWorker`, as the trainer reduces them."""
    from engine_program import EngineProgram, policy_loss
    from verl.utils import tensordict_utils as tu
    from verl.utils.device import get_device_name
    from verl.utils.metric import reduce_metrics
    from verl.utils.profiler import DistProfiler
    from verl.workers.engine_workers import TrainingWorker

    program = EngineProgram(LAYOUT, "R3", settings)
    engine, space = program.engine, types.SimpleNamespace
    engine._is_offload_param = engine._is_offload_optimizer = False
    engine.lr_scheduler = space(step=lambda _: None)
    worker = TrainingWorker.__new__(TrainingWorker)  # its __init__ makes process groups and downloads a model
    worker.engine, worker.loss_fn, worker.flops_counter = engine, policy_loss, None
    worker.engine_config = space(
        **vars(engine.engine_config), forward_only=False, use_dynamic_bsz=True, max_token_len_per_gpu=40,
        micro_batch_size_per_gpu=None, infer_max_token_len_per_gpu=40, infer_micro_batch_size_per_gpu=None,
    )  # fmt: skip
    worker.model_config, worker.device_name, worker.profiler = {}, get_device_name(), DistProfiler(rank=0)
    recompute = worker.infer_batch(tu.assign_non_tensor(program.batch(0), compute_loss=False))
    update = worker.train_mini_batch(tu.assign_non_tensor(program.batch(0), num_mini_batch=2))
    if settings is not None:
        engine._foremoe.close()
    return [reduce_metrics(tu.get(output, "metrics")) for output in (recompute, update)]


def test_metrics_pass_through_verls_worker(pool):
    plain, planned = (pool.run(work, of, timeout_s=120, limit_s=600) for of in (None, Settings(objective="balance")))
    for (_, a), (recompute, update) in zip(plain, planned, strict=True):
        assert update["policy_loss"] == pytest.approx(a["policy_loss"], rel=1e-4)
        assert recompute["foremoe/recompute/unplanned"] == update["foremoe/update/unplanned"] == 0.0
        assert update["foremoe/update/skew_after"] < update["foremoe/update/skew_before"]
        assert update["foremoe/update/replicas"] > 0
