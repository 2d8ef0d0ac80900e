"""Cluster: presets, node mapping, TOML round trips, refusals."""

import dataclasses
import tomllib
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foremoe.base.errors import InputError
from foremoe.machine.cluster import Cluster, nodes_in_order
from foremoe.machine.model import Model

NAMES = ("8xh100", "8xh800", "8xh200", "8xh20", "8xa100", "8xpcie", "8xb200", "gb200-nvl72", "8xb300", "gb300-nvl72")
SMALL = {
    "name": "box", "num_ranks": 4, "flops_per_s": 1e12, "compute_efficiency": 0.5, "slot_overhead_s": 0.0,
    "peer_bytes_per_s": 4e9, "rdma_bytes_per_s": 2e9, "host_bytes_per_s": 1e9, "peer_latency_s": 0.0, "rdma_latency_s": 1e-5,
    "host_latency_s": 1e-6, "copy_contention": 0.0, "memory_bytes": 1000, "source": "by hand",
}  # fmt: skip
SPEEDS = ["flops_per_s", "peer_bytes_per_s", "rdma_bytes_per_s"]
# At least zero; no host stores where `host_bytes_per_s` is.
SECONDS = [
    "host_bytes_per_s", "slot_overhead_s", "peer_latency_s", "rdma_latency_s", "host_latency_s", "layer_overhead_s",
    "pair_overhead_s", "element_overhead_s", "host_layer_s", "planned_layer_s", "planned_token_s",
]  # fmt: skip
WHOLE = ["num_ranks", "nic_sharing", "memory_bytes"]


@st.composite
def node_maps(draw):
    if draw(st.booleans()):
        return nodes_in_order(draw(st.integers(1, 64)), draw(st.integers(1, 20)))
    num_nodes = draw(st.integers(1, 6))
    extra = draw(st.lists(st.integers(0, num_nodes - 1), max_size=20))
    return np.array(draw(st.permutations([*range(num_nodes), *extra])), np.int32)


@st.composite
def clusters(draw):
    nodes = draw(node_maps())
    speed = st.floats(0, 1e300, exclude_min=True)
    seconds = st.floats(0, 1e300)
    label = st.text(st.characters(exclude_categories="CZ", include_characters=" "), min_size=1).filter(str.strip)
    return Cluster(
        name=draw(label),
        num_ranks=len(nodes),
        node_of_rank_G=nodes,
        **{name: draw(speed) for name in SPEEDS},
        **{name: draw(seconds) for name in SECONDS},
        compute_efficiency=draw(st.floats(0, 1, exclude_min=True)),
        attention_efficiency=draw(st.none() | st.floats(0, 1, exclude_min=True)),
        backward_ratio=draw(speed),
        plain_bytes_per_s=draw(st.none() | speed),
        return_bytes_per_s=draw(st.none() | speed),
        score_flops_per_s=draw(st.none() | speed),
        tile_pairs=draw(st.integers(1, 65536)),
        precision=draw(label),
        attention_backward_ratio=draw(st.none() | speed),
        slot_backward_s=draw(st.none() | seconds),
        nic_sharing=draw(st.integers(1, 32767)),
        copy_contention=draw(st.floats(0, 1)),
        memory_bytes=draw(st.integers(1, 2**53)),
        calibrated=draw(st.booleans()),
        residual=draw(st.none() | seconds),
        source=draw(label),
    )


def table(**changes):
    return {**SMALL, "ranks_per_node": 2, **changes}


def refusal(call, *args, **kwargs):
    with pytest.raises(InputError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and len(message) < 600
    return message


# --- presets


def test_preset_names():
    assert Cluster.preset_names() == NAMES
    for name in NAMES:
        cluster = Cluster.preset(name.upper())
        assert cluster.same_as(Cluster.preset(name))
        assert (cluster.name, cluster.num_ranks, cluster.num_nodes, cluster.ranks_per_node) == (name, 8, 1, 8)
        assert not cluster.calibrated and cluster.source


def test_unknown_preset_lists_the_names():
    assert "did you mean '8xh100'? choose" in refusal(Cluster.preset, "h100")
    message = refusal(Cluster.preset, "8xmi300")
    assert "8xmi300" in message and all(name in message for name in NAMES)


@pytest.mark.parametrize(
    ("model", "host_ms", "peer_ms", "rdma_ms"),
    # As long as an expert is known to take on PCIe 5 x16, NVLink 4 and 400 Gb/s RDMA.
    [("qwen3-30b-a3b", 0.17, 0.024, 0.21), ("qwen3-235b-a22b", 0.69, 0.094, 0.84)],
)
def test_expert_copy_times_on_h100(model, host_ms, peer_ms, rdma_ms):
    cluster, size = Cluster.preset("8xh100", host_store=True), Model.preset(model).expert_bytes
    assert size / cluster.host_bytes_per_s * 1e3 == pytest.approx(host_ms, rel=0.02)
    assert size / cluster.peer_bytes_per_s * 1e3 == pytest.approx(peer_ms, rel=0.02)
    assert size / cluster.rdma_bytes_per_s_per_rank * 1e3 == pytest.approx(rdma_ms, rel=0.02)


def test_preset_figures_keep_below_their_data_sheets():
    peaks = {  # TFLOP/s dense bf16; GB/s of one direction: peer, NIC, host; GB of memory
        "8xh100": (989.4, 450, 50, 64, 80),
        "8xh800": (989.4, 200, 50, 64, 80),
        "8xh200": (989.4, 450, 50, 64, 141),
        "8xh20": (148, 450, 50, 64, 96),
        "8xa100": (312, 300, 25, 32, 80),
        "8xpcie": (362.05, 32, 25, 32, 48),
        "8xb200": (2250, 900, 50, 64, 180),
        "gb200-nvl72": (2500, 900, 50, 225, 186),
        "8xb300": (2250, 900, 100, 64, 288),
        "gb300-nvl72": (2500, 900, 100, 225, 288),
    }
    for name, (tflops, peer, nic, host, memory) in peaks.items():
        c = Cluster.preset(name, host_store=True)
        assert Cluster.preset(name).host_bytes_per_s == 0.0
        assert c.flops_per_s == pytest.approx(tflops * 1e12) and c.memory_bytes == memory * 10**9
        assert 0.6 * peer < c.peer_bytes_per_s / 1e9 < peer
        assert 0.7 * nic < c.rdma_bytes_per_s / 1e9 < nic
        assert 0.7 * host < c.host_bytes_per_s / 1e9 < host
    assert Cluster.preset("8xpcie").rdma_bytes_per_s_per_rank == 23e9 / 4


def test_every_preset_says_what_is_assumed():
    text = files("foremoe.machine").joinpath("presets", "clusters.toml").read_text()
    tables = tomllib.loads(text)
    assert all("assumptions" in t["source"] and "NVIDIA" in t["source"] for t in tables.values())
    for line in text.splitlines():
        key = line.split(" ")[0]
        if key in ("compute_efficiency", "slot_overhead_s", "copy_contention") or key.endswith("latency_s"):
            assert line.endswith(("# assumption", "# fitted: bench/overheads.py", "# as 8xh100"))


# --- nodes


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "nodes"),
    [
        (8, None, [0] * 8),
        (3, None, [0] * 3),
        (16, None, [0] * 8 + [1] * 8),
        (12, None, [0] * 8 + [1] * 4),
        (6, 4, [0] * 4 + [1] * 2),
        (4, 1, [0, 1, 2, 3]),
        (4, 72, [0] * 4),
    ],
)
def test_preset_nodes(num_ranks, ranks_per_node, nodes):
    cluster = Cluster.preset("8xh100", num_ranks=num_ranks, ranks_per_node=ranks_per_node)
    assert cluster.node_of_rank_G.tolist() == nodes and cluster.node_of_rank_G.dtype == np.int32
    assert not cluster.node_of_rank_G.flags.writeable
    assert cluster.num_nodes == nodes[-1] + 1
    assert cluster.ranks_per_node == max(nodes.count(n) for n in nodes)


def test_any_mapping():
    cluster = Cluster(**SMALL, node_of_rank_G=[1, 0, 1, 0])
    assert (cluster.num_nodes, cluster.ranks_per_node) == (2, 2)
    assert Cluster(**SMALL).node_of_rank_G.tolist() == [0] * 4
    assert Cluster(**{**SMALL, "num_ranks": 9}).node_of_rank_G.tolist() == [0] * 8 + [1]


@given(nodes=node_maps())
def test_node_counts(nodes):
    cluster = Cluster(**{**SMALL, "num_ranks": len(nodes)}, node_of_rank_G=nodes)
    sizes = [nodes.tolist().count(n) for n in range(max(nodes) + 1)]
    assert (cluster.num_nodes, cluster.ranks_per_node) == (len(sizes), max(sizes))


@given(num_ranks=st.integers(1, 200), ranks_per_node=st.integers(1, 40))
def test_with_ranks_changes_only_the_nodes(num_ranks, ranks_per_node):
    start = dataclasses.replace(Cluster.preset("8xpcie"), calibrated=True)
    cluster = start.with_ranks(num_ranks, ranks_per_node)
    assert cluster.node_of_rank_G.tolist() == [g // ranks_per_node for g in range(num_ranks)]
    assert cluster.calibrated == (num_ranks <= ranks_per_node)  # links across nodes were not there to be fitted
    assert dataclasses.replace(cluster.with_ranks(8, 8), calibrated=True).same_as(start)
    alone = start.with_ranks(1, 1)
    assert alone.calibrated and not alone.with_ranks(2, 2).calibrated and not alone.with_ranks(2, 1).calibrated


@given(calibrated=st.booleans(), residual=st.none() | st.floats(0, 100))
def test_the_residual_stands_wherever_calibrated_stands(calibrated, residual):
    cluster = dataclasses.replace(Cluster.preset("8xh100"), calibrated=calibrated, residual=residual)
    words = cluster.standing
    assert ("uncalibrated" in words or "not calibrated" in words) == (not calibrated)
    if calibrated:
        assert "residual" in words
    assert residual is None or f"residual {residual:.0%}" in words


# --- round trips


@settings(deadline=None)
@given(cluster=clusters())
def test_toml_round_trip_is_identity(tmp_path_factory, cluster):
    path = tmp_path_factory.getbasetemp() / "cluster.toml"
    cluster.to_toml(path)
    assert Cluster.from_toml(path).same_as(cluster)
    assert Cluster.from_dict(cluster.to_dict()).same_as(cluster)
    first = path.read_bytes()
    Cluster.from_toml(path).to_toml(path)
    assert path.read_bytes() == first


def test_toml_names_the_node_size_where_it_can(tmp_path):
    path = tmp_path / "cluster.toml"
    Cluster.preset("8xh100", num_ranks=12).to_toml(path)
    read = tomllib.loads(path.read_text())
    assert (read["num_ranks"], read["ranks_per_node"]) == (12, 8) and "node_of_rank" not in read
    Cluster(**SMALL, node_of_rank_G=[0, 1, 0, 1]).to_toml(path)
    read = tomllib.loads(path.read_text())
    assert read["node_of_rank"] == [0, 1, 0, 1] and "ranks_per_node" not in read


def test_what_only_a_fit_knows_is_written_where_it_was_fitted(tmp_path):
    assert (
        not {"attention_efficiency", "backward_ratio", "layer_overhead_s", "pair_overhead_s"} & Cluster(**SMALL).to_dict().keys()
    )
    fitted = Cluster(**SMALL, attention_efficiency=0.25, layer_overhead_s=1e-4, calibrated=True)
    fitted.to_toml(tmp_path / "fitted.toml")
    assert Cluster.from_toml(tmp_path / "fitted.toml").same_as(fitted)
    assert (fitted.attention_flops_per_s, fitted.expert_flops_per_s) == (0.25e12, 0.5e12)
    assert Cluster(**SMALL).attention_flops_per_s == 0.5e12


def test_node_list_alone_gives_the_number_of_ranks():
    fields = {k: v for k, v in SMALL.items() if k != "num_ranks"}
    assert Cluster.from_dict({**fields, "node_of_rank": [0, 1, 0]}).num_ranks == 3


# --- refusals


@pytest.mark.parametrize("name", SPEEDS)
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "fast", None, True])
def test_speeds_refuse(name, value):
    assert name in refusal(Cluster, **{**SMALL, name: value})


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf"), "0", None, False])
def test_seconds_refuse(name, value):
    assert name in refusal(Cluster, **{**SMALL, name: value})


@pytest.mark.parametrize(
    ("name", "low"), [("compute_efficiency", 0.0), ("attention_efficiency", 0.0), ("copy_contention", -0.01)]
)
def test_shares_refuse(name, low):
    for value in (low, 1.01, float("nan"), "half"):
        assert name in refusal(Cluster, **{**SMALL, name: value})


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [0, -1, 2**53 + 1, pytest.param(10**5000, id="huge"), 4.0, "4", None, True])
def test_whole_number_fields_refuse(name, value):
    assert name in refusal(Cluster, **{**SMALL, name: value})


def test_flag_and_text_refuse():
    assert "calibrated" in refusal(Cluster, **SMALL, calibrated=1)
    assert "name" in refusal(Cluster, **{**SMALL, "name": ""})
    assert "source" in refusal(Cluster, **{**SMALL, "source": "two\nlines"})


@pytest.mark.parametrize(
    "nodes",
    [[0, 0, 0], [0] * 5, [], [[0, 0], [1, 1]], [0, 2, 0, 2], [1, 1, 1, 1], [-1, 0, 0, 0], [0, 0.5, 0, 0], "0000", 0],
)
def test_node_maps_refuse(nodes):
    assert "node_of_rank_G" in refusal(Cluster, **SMALL, node_of_rank_G=nodes)


def test_ragged_node_map_refuses():
    assert "node_of_rank_G" in refusal(Cluster, **SMALL, node_of_rank_G=[[0], [0, 1]])


@pytest.mark.parametrize("value", [0, -1, 2.0, "8", 40000])
def test_counts_of_presets_refuse(value):
    assert "num_ranks" in refusal(Cluster.preset, "8xh100", num_ranks=value)
    assert "ranks_per_node" in refusal(Cluster.preset, "8xh100", ranks_per_node=value)
    assert "num_ranks" in refusal(Cluster.preset("8xh100").with_ranks, value, 8)


@pytest.mark.parametrize("missing", [*SMALL, "ranks_per_node"])
def test_missing_key(missing):
    message = refusal(Cluster.from_dict, {k: v for k, v in table().items() if k != missing})
    assert "lacks" in message and missing in message


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"gpus": 8}, "'gpus'"),
        ({"node_of_rank_G": [0, 0, 1, 1]}, "'node_of_rank_G'"),
        ({"node_of_rank": [0, 0, 1, 1]}, "both"),
        ({"ranks_per_node": 0}, "ranks_per_node"),
        ({"flops_per_s": "1e12"}, "flops_per_s"),
    ],
)
def test_bad_tables(changes, word):
    assert word in refusal(Cluster.from_dict, table(**changes))


@pytest.mark.parametrize("nodes", [[0, 0, 1], "0011", [0, 0, 1, 1.0], [0, 0, 1, [1]], [0, 0, 2, 2], []])
def test_bad_node_lists(nodes):
    assert "node_of_rank" in refusal(Cluster.from_dict, {**SMALL, "node_of_rank": nodes})


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "cluster.toml"
    Cluster(**SMALL).to_toml(path)
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert path.read_bytes()[:3] == b"\xef\xbb\xbf" and Cluster.from_toml(path).same_as(Cluster(**SMALL))


def test_broken_files(tmp_path):
    path = tmp_path / "cluster.toml"
    assert "no file" in refusal(Cluster.from_toml, path)
    path.write_text("name = ")
    assert "not valid TOML" in refusal(Cluster.from_toml, path)
    Cluster(**SMALL).to_toml(path)
    path.write_text(path.read_text().replace("num_ranks = 4", "num_ranks = 'four'"))
    message = refusal(Cluster.from_toml, path)
    assert "cluster.toml" in message and "num_ranks" in message
    refusal(Cluster(**SMALL).to_toml, tmp_path)
