"""A plan runs on MoELayers of Megatron-Core: two ranks, 1F1B, against the same layers as they are."""

import numpy as np
import pytest

import foremoe

pytest.importorskip("megatron.core", reason="megatron-core is not installed; make test-megatron installs it")

from arms import FFN, HIDDEN, two_arms

from foremoe.testing.ranks import RankPool

# Letters: M micro-steps, L layers, G ranks, T tokens of a source, K top-k, E experts, S slots of a rank.

M, G, T, K, E = 4, 2, 24, 2, 8
# Only the order of float64 sums differs. (Megatron's router takes its softmax in float32, of equal numbers in both arms.)
BOUND = 1e-10


@pytest.fixture(scope="module")
def pool():
    """Ranks of their own: Megatron-Core on CPU changes the process for good."""
    with RankPool(G) as ranks:
        yield ranks


def routing(num_layers, seed=0):
    """int64 [M, L, G, T, K]: experts 0 to 3, at home on rank 0, are chosen three times as often, one of them most."""
    rng = np.random.default_rng(seed)
    topk = np.empty((M, num_layers, G, T, K), np.int64)
    for m, layer in np.ndindex(M, num_layers):
        weight_E = np.where(np.arange(E) < E // G, 3.0, 1.0)
        weight_E[(m + layer) % (E // G)] = 9.0
        for g, t in np.ndindex(G, T):
            topk[m, layer, g, t] = rng.choice(E, K, replace=False, p=weight_E / weight_E.sum())
    return topk


def counts(topk_MLGTK):
    """How often every source chooses every expert, [M, L, G, E]."""
    return np.stack([(topk_MLGTK == e).sum(axis=(3, 4)) for e in range(E)], axis=-1)


def planned_for(topk_MLGTK, schedule, slots):
    """The plan for a routing, and what it gives to every source."""
    num_layers = topk_MLGTK.shape[1]
    model = foremoe.Model(
        name="toy", num_layers=num_layers, num_experts=E, num_topk=K, hidden_size=HIDDEN, ffn_size=FFN, first_moe_layer=0,
        attention_params=1, num_heads=1, qk_head_dim=1, v_head_dim=1, source="made up for this test",
    )  # fmt: skip
    workload = foremoe.Workload.from_counts(counts(topk_MLGTK), num_topk=K, stage="update")
    problem = foremoe.Problem.of(
        workload,
        foremoe.Cluster.preset("8xh100", num_ranks=G),
        model=model,
        redundant=1,
        cost=foremoe.CostModel(objective="balance"),
        schedule=schedule,
        slots=slots,
    )
    plan, _ = foremoe.Planner().plan(problem)
    plan.check(problem)
    return plan, np.stack([plan.rows_for(workload, g) for g in range(G)])


def expected_service(plan, split_GMLP, topk_MLGTK):
    """[M, L, G, S]: of what occurs, each slot serves its share; what no slot was to serve goes home. And how much that is."""
    served_MLP = np.zeros(split_GMLP.shape[1:], np.int64)
    excess = 0
    for (m, layer, g, e), left in np.ndenumerate(counts(topk_MLGTK)):
        for p in np.flatnonzero(plan.expert_MLGS[m, layer].ravel() == e):
            served = min(left, split_GMLP[g, m, layer, p])
            served_MLP[m, layer, p] += served
            left -= served
        rank, slot = divmod(plan.home_LE[layer, e], plan.B)
        served_MLP[m, layer, rank * plan.S + slot] += left
        excess += left
    return served_MLP.reshape(plan.quota_MLGS.shape), excess


def check_equal(differences, rank):
    assert set(differences) == {"output", "loss", "input", "router", "expert", "reduced"}
    for kind, parts in differences.items():
        assert all(part <= BOUND for part in parts), f"rank {rank}, {kind}: {parts}"  # NaN is not


@pytest.mark.parametrize("reforward", [False, True], ids=["kept", "reforward"])
@pytest.mark.parametrize(
    ("num_layers", "slots"),
    [(1, foremoe.SharedSlots(depth=1)), (1, foremoe.ResidentSlots(copies=2)), (2, foremoe.SharedSlots(depth=3))],
    ids=["one-buffer", "resident", "two-layers"],
)
def test_equal_to_the_layers_as_they_are(pool, num_layers, slots, reforward):
    topk_MLGTK = routing(num_layers)
    schedule = foremoe.Schedule.one_f_one_b(M, pp=2, pp_rank=0, reforward=reforward)
    assert schedule.phase_X[:2].tolist() == [0, 0]  # forward of micro-step 1 before backward of 0
    plan, split_GMLP = planned_for(topk_MLGTK, schedule, slots)
    assert (plan.quota_MLGS[..., plan.B :] > 0).any(axis=(2, 3)).all(), "every row should have a replica"
    assert (plan.skew_ML < 1.05).all()

    answers = pool.run(two_arms, plan, split_GMLP, topk_MLGTK, True)
    for g, (differences, served_MLS, num_drift, timeline) in enumerate(answers):
        check_equal(differences, g)
        np.testing.assert_array_equal(served_MLS, plan.quota_MLGS[:, :, g])
        assert num_drift == 0
        assert timeline["weight_copies"] == (plan.transfers.dst_C == g).sum()
    assert sum(timeline["gradient_returns"] for *_, timeline in answers) == plan.num_replicas


def test_tokens_the_plan_did_not_know_go_home(pool):
    topk_MLGTK = routing(1)
    plan, split_GMLP = planned_for(topk_MLGTK, foremoe.Schedule.one_f_one_b(M, pp=2, pp_rank=0), foremoe.SharedSlots())
    topk_MLGTK[:, :, :, -3:] = routing(1, seed=1)[:, :, :, -3:]
    served_MLGS, excess = expected_service(plan, split_GMLP, topk_MLGTK)
    assert excess > 0
    answers = pool.run(two_arms, plan, split_GMLP, topk_MLGTK, True)
    for g, (differences, served_MLS, _, _) in enumerate(answers):
        check_equal(differences, g)
        np.testing.assert_array_equal(served_MLS, served_MLGS[:, :, g])
    assert sum(num_drift for _, _, num_drift, _ in answers) == excess
