"""attach and detach leave a model as it was; outside a stage nothing changes, and stages may follow each other."""

import contextlib
import gc
import weakref
from types import SimpleNamespace

import cpu
import program_arms as arms
import pytest
import torch
from layouts import Case
from logged import logged
from program import Layout, Program

from foremoe.base.errors import InputError
from foremoe.integrations.megatron import AttachSettings
from foremoe.machine.cluster import Cluster
from foremoe.testing.ranks import run_threads

CASES = (
    Case(2, Layout(overlap_grad=True, overlap_param=True, shared_experts=True)),
    Case(2, Layout(num_layers=3, dense=(1,), bf16=True, grouped=True, distributed=False), 8),
    Case(4, Layout(pp=2, vpp=2, num_layers=4, recompute="selective")),
    Case(2, Layout(recompute="full", dispatcher="deepep")),
)

OF_A_STEP = ("input_tensor", "current_microbatch")  # what Megatron itself leaves in modules after a step


def picture(program):
    """What attach must not change: contents, names and places of parameters, and what every module and config holds."""
    held = {}
    for c, chunk in enumerate(program.chunks):
        for name, module in chunk.named_modules():
            for key, value in vars(module).items():
                if key in OF_A_STEP:
                    continue
                held[c, name, key] = sorted(map(str, value)) if isinstance(value, dict) else id(value)
    return {
        "state": [{k: v.view(torch.uint8).numpy().tobytes() for k, v in _tensors(m)} for m in program.bare],
        "parameters": [
            [(n, tuple(p.shape), p.data_ptr(), p.main_grad.data_ptr()) for n, p in m.named_parameters()] for m in program.bare
        ],
        "held": held,
        "config": {key: id(value) for key, value in vars(program.config).items()},
    }


def _tensors(module):
    return [(k, v.detach().contiguous().view(-1)) for k, v in module.state_dict().items() if isinstance(v, torch.Tensor)]


def step(program, moe=None, forward_only=False):
    """Losses and gradients of one step by the kernels as they are."""
    program.zero()
    topk_MTLK = program.routing(0)
    if moe is None:
        losses = program.forward_backward(0, topk_MTLK, forward_only)
    else:
        with moe.stage([topk_TLK.numpy() for topk_TLK in topk_MTLK], "recompute" if forward_only else "update"):
            losses = program.forward_backward(0, topk_MTLK, forward_only)
    return losses, program.main_grads()


def same(one, other):
    return one[0] == other[0] and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


def attached_and_detached(_group, case):
    """Whether (before, attached, detached) have the same picture and the same step; and what attach leaves in modules."""
    program = Program(case.layout)
    before, plain = picture(program), step(program)
    with arms.attached(program, case) as moe:
        extra = {key[2] for key in picture(program)["held"].keys() - before["held"].keys()}
        attached = same(plain, step(program))
        step(program, moe)
        after_stage = same(plain, step(program)), {key[2] for key in picture(program)["held"].keys() - before["held"].keys()}
        moe.detach()
        moe.detach()
    after = picture(program)
    changed = sorted(kind for kind in before if before[kind] != after[kind])
    return attached, after_stage, extra, changed, same(plain, step(program))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_model_is_what_it_was_before(pool, case):
    for attached, after_stage, extra, changed, detached in pool.run(attached_and_detached, case, num_ranks=case.num_ranks):
        assert attached and detached and extra == {"_foremoe"} and changed == []
        assert after_stage == (True, {"_foremoe"})


def what_stays(_group, case):
    """Objects of foremoe that outlive detach, and tensors that are more than before."""
    program = Program(case.layout)
    step(program)
    gc.collect()
    before = sum(isinstance(x, torch.Tensor) for x in gc.get_objects())
    with arms.attached(program, case) as moe:
        step(program, moe)
        owned = [
            moe._engine,
            moe._buffers,
            *moe._layers,
            *(x for i in range(moe._buffers.num_buffers) for x in moe._buffers.slot(i)),
        ]
        watched = [(type(x).__name__, weakref.ref(x)) for x in owned]
        slot_bytes = moe.report.slot_bytes
        del owned
    del moe
    gc.collect()
    alive = [name for name, ref in watched if ref() is not None]
    return alive, sum(isinstance(x, torch.Tensor) for x in gc.get_objects()) - before, slot_bytes


def test_memory_returns(pool):
    for alive, more, slot_bytes in pool.run(what_stays, CASES[0], num_ranks=2):
        assert alive == [] and more <= 0 and slot_bytes > 0


def stages(_group, case):
    """Losses and the gradients' norm of a recompute and two update stages, without foremoe and by plans."""
    found = []
    for planned in (False, True):
        program, run = Program(case.layout), []
        with contextlib.ExitStack() as stack:
            moe = stack.enter_context(arms.attached(program, case)) if planned else None
            stack.enter_context(cpu.steady_rows())
            for number, stage in enumerate(("recompute", "update", "update")):
                program.zero()
                topk_MTLK, forward_only = program.routing(number), stage == "recompute"
                with contextlib.ExitStack() as inside:
                    if moe:
                        inside.enter_context(moe.stage([x.numpy() for x in topk_MTLK], stage))
                    inside.enter_context(torch.set_grad_enabled(not forward_only))
                    losses = program.forward_backward(number, topk_MTLK, forward_only)
                run.append((losses, sum(float(g.double().square().sum()) for g in program.main_grads().values())))
                if moe:
                    assert moe.metrics()["replicas"] > 0 and moe.metrics()["drift"] == 0
                if not forward_only:
                    program.optimizer.step()
        found.append(run)
    return found


@pytest.mark.parametrize("case", [Case(2, Layout(recompute="full")), CASES[2]], ids=str)
def test_a_recompute_stage_then_two_updates(pool, case):
    for plain, planned in pool.run(stages, case, num_ranks=case.num_ranks):
        assert planned[0] == plain[0] and plain[0][1] == 0.0
        for (losses, norm), (other, other_norm) in zip(plain[1:], planned[1:], strict=True):
            assert other == pytest.approx(losses, rel=1e-5) and other_norm == pytest.approx(norm, rel=1e-4) and norm > 0


def misuse(_group, case):
    """What foremoe says to each thing that it cannot do, by name."""
    from foremoe.integrations.megatron import attach

    program = Program(case.layout)
    said = {}

    def attempt(name, call):
        try:
            call()
        except InputError as error:
            said[name] = str(error)

    topk_MTLK = program.routing(0)
    work = [topk_TLK.numpy() for topk_TLK in topk_MTLK]
    attempt("no chunks", lambda: attach([]))
    attempt("no model", lambda: attach(torch.nn.Linear(2, 2)))
    with arms.attached(program, case) as moe:
        attempt("twice", lambda: arms.attached(program, case).__enter__())
        attempt("other stage", lambda: moe.stage(work, "rollout").__enter__())
        attempt("other schedule", lambda: moe.stage(moe.plan(work, "recompute"), "update").__enter__())
        attempt("no split", lambda: moe.stage(moe.plan(work).plan).__enter__())
        attempt("not a list", lambda: moe.stage("work").__enter__())
        attempt("no micro-steps", lambda: moe.stage([]).__enter__())
        attempt("top-k", lambda: moe.stage([x[:, :, :1] for x in work]).__enter__())
        attempt("layers", lambda: moe.stage([x[:, :1] for x in work]).__enter__())
        attempt("experts", lambda: moe.stage([x + 5 for x in work]).__enter__())
        planned = moe.plan(work)
        with moe.stage(work):
            attempt("nested", lambda: moe.stage(work).__enter__())
            attempt("detach", moe.detach)
            program.forward_backward(0, topk_MTLK)
    with arms.attached(program, case, redundant=2) as moe:
        attempt("other R", lambda: moe.stage(planned).__enter__())
    with arms.attached(program, case) as moe:
        with moe.stage(planned):
            program.forward_backward(0, topk_MTLK)
        attempt("after all", lambda: None)

        def stage_without_passes():
            with moe.stage(planned):
                pass

        attempt("nothing run", stage_without_passes)
        attempt("after that", lambda: moe.stage(planned).__enter__())
    attempt("detached", lambda: moe.stage(planned).__enter__())
    return said


def test_misuse_is_refused_in_one_sentence(pool):
    wanted = {
        "twice": "already attached to this model", "other stage": "stage must be one of", "other schedule": "the plan's schedule",
        "no split": "needs split_MLP", "not a list": "got str", "layers": "routing of 1 layers was given",
        "nested": "do not nest", "experts": "there are 8", "detach": "a stage is running",
        "other R": "the plan is for redundant=1", "nothing run": "uses were not run", "after that": "an earlier stage failed",
        "detached": "attach it again", "no chunks": "model_chunks is empty", "no model": "(Linear) has no decoder.layers",
        "no micro-steps": "got an empty list", "top-k": "the routing is top-1 and the model top-2",
    }  # fmt: skip
    for said in pool.run(misuse, Case(2, Layout(num_layers=3, dense=(1,)), 2), num_ranks=2):
        assert said.keys() == wanted.keys()
        assert all(part in said[name] for name, part in wanted.items()), said


def test_plans_count_on_host_stores_only_where_a_backend_has_them():
    from foremoe.integrations.megatron.layout import cluster_of

    given, flex = Cluster.preset("8xh100", num_ranks=2, host_store=True), SimpleNamespace(moe_token_dispatcher_type="flex")
    each = [AttachSettings(cluster=given, backends=names) for names in (["collective"], ["collective", "pinned_host"])]
    alone, beside = (
        run_threads(lambda group, settings=settings: cluster_of(group, settings, flex).host_bytes_per_s, 2) for settings in each
    )
    assert alone == [0.0, 0.0] and beside == [given.host_bytes_per_s] * 2


@pytest.mark.parametrize(("dispatcher", "dispatch"), [("flex", "node"), ("alltoall", "pairs")])
def test_plans_are_priced_by_the_dispatch_of_the_models_dispatcher(dispatcher, dispatch):
    from foremoe.integrations.megatron.layout import cluster_of

    config = SimpleNamespace(moe_token_dispatcher_type=dispatcher)
    for given in (None, Cluster.preset("8xh100", num_ranks=2)):
        settings = AttachSettings(cluster=given, backends=["collective"])
        found = run_threads(lambda group, settings=settings: cluster_of(group, settings, config).dispatch, 2)
        assert found == [dispatch] * 2


def by_number(_group, case):
    """Replicas of a step with routing of all MoE layers, where the config does not say which layers these are."""
    program = Program(case.layout)
    program.config.moe_layer_freq = 1  # as hybrid models have it, whose layers are in a pattern of another name
    topk_MTLK = program.routing(0)
    with arms.attached(program, case) as moe, moe.stage([topk_TLK.numpy() for topk_TLK in topk_MTLK], "recompute"):
        program.forward_backward(0, topk_MTLK, forward_only=True)
    return moe.report.drift_ML.sum(), moe.metrics()["replicas"], moe.moe_layers


def test_layers_are_known_by_their_numbers_whatever_the_config_says(pool):
    case = Case(4, Layout(pp=2, num_layers=4, dense=(1,)))
    answers = pool.run(by_number, case, num_ranks=4)
    assert [layers for _, _, layers in answers] == [[0], [0], [2, 3], [2, 3]]
    assert all(drift == 0 and replicas > 0 for drift, replicas, _ in answers)


@pytest.mark.parametrize(
    ("mine", "numbers", "predicting", "given", "found"),
    [
        ([2, 3], [0, 2, 3], (0, 0), 2, [0, 1]),
        ([2, 3], [0, 2, 3], (0, 0), 3, [1, 2]),
        ([2, 3], [0, 2, 3], (0, 0), 4, [2, 3]),
        ([2, 3], [0, 2, 3], (0, 0), 5, None),
        # Routers of multi-token prediction are recorded and replayed by some trainers, too.
        ([3], [0, 2, 3], (1, 1), 2, [0]),
        ([3], [0, 2, 3], (1, 1), 5, [3]),
        ([0, 2], [0, 2], (1, 1), 3, [0, 1]),
        ([2, 3], [0, 2, 3], (1, 1), 3, [1, 2]),
    ],
)
def test_which_layers_routing_is_of(mine, numbers, predicting, given, found):
    from foremoe.integrations.megatron.planning import Planning

    config, places = SimpleNamespace(num_layers=4), [SimpleNamespace(number=number) for number in mine]
    planning = SimpleNamespace(config=config, places=places, numbers=numbers, predicting=predicting)
    if found is None:
        with pytest.raises(InputError, match="Give those of this rank, or all"):
            Planning._local(planning, given)
    else:
        assert Planning._local(planning, given) == found


def test_routing_that_could_be_of_other_layers_is_taken_for_all_layers_and_said():
    """As many layers of multi-token prediction as dense ones."""
    from foremoe.integrations.megatron.planning import Planning
    from foremoe.integrations.once import warn_once

    config, places = SimpleNamespace(num_layers=4), [SimpleNamespace(number=number) for number in (2, 3)]
    planning = SimpleNamespace(config=config, places=places, numbers=[0, 2, 3], predicting=(1, 1))
    warn_once.cache_clear()
    with logged() as said:
        assert [Planning._local(planning, 4) for _ in range(2)] == [[2, 3]] * 2
    (message,) = [record.getMessage() for record in said]
    assert "of 4 layers is taken for that of all layers of the model; it could be that of the model's MoE layers and" in message


def watched(_group, case):
    """A step with ``redundant=0`` and one without foremoe; what a layer has meanwhile, metrics, and skews of real plans."""
    program = Program(case.layout)
    plain, topk_MTLK = step(program), program.routing(0)
    work = [topk_TLK.numpy().copy() for topk_TLK in topk_MTLK]
    for topk_TLK in work:
        topk_TLK[:3] = -1
    moes = [layer.mlp for m in program.bare for layer in m.decoder.layers if hasattr(layer.mlp, "router")]
    with arms.attached(program, case, redundant=0) as moe:
        program.zero()
        with moe.stage(work):
            replaced = [name for each in moes for name in vars(each) if name == "preprocess"]
            losses = program.forward_backward(0, topk_MTLK)
        found, grads = moe.metrics(), program.main_grads()
        with pytest.raises(InputError, match="redundant=0, which only watches"), moe.stage(moe.report.planned[0]):
            pass
    planned = []
    for redundant in (1, 2):
        with arms.attached(program, case, redundant=redundant) as moe:
            planned.append(moe.plan(work).plan.skew_ML.mean())
    return same(plain, (losses, grads)), replaced, found, planned


def test_without_redundant_slots_a_stage_is_watched_and_runs_as_ever(pool):
    for equal, replaced, found, planned in pool.run(watched, Case(4, Layout(pp=2, num_layers=4)), num_ranks=4):
        assert equal and not replaced
        assert [found["skew_at_1"], found["skew_at_2"]] == pytest.approx(planned)
        assert found["skew_at_2"] <= found["skew_at_1"] < found["skew_before"] < found["hottest"]
        assert found["unknown"] == pytest.approx(3 / 24) and found["plan_s"] > 0
