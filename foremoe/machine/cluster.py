"""Cluster: the speed of ranks and of the links between them, and the node of each rank."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from foremoe.base import fields
from foremoe.base.arrays import Array, ArrayValue
from foremoe.base.errors import InputError, naming
from foremoe.machine.cluster_fields import CHECKS, MAX_RANKS, OPTIONAL, checked_nodes
from foremoe.machine.cluster_fields import DISPATCHES as DISPATCHES
from foremoe.machine.cluster_fields import nodes_in_order as nodes_in_order
from foremoe.machine.precision import at_precision

_FILE = "clusters.toml"
TYPICAL_ERROR = 0.12
"""Median error of the simulator without calibration, on published figures to which nothing was fitted (`bench.published`)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cluster(ArrayValue):
    """The ranks of one EP group and the links between them. Bandwidths are effective and for one direction.

    Attributes:
        name: Type of node.
        num_ranks: G, the number of ranks in the EP group.
        node_of_rank_G: int32 [G], the node of each rank. Nodes are numbered from 0, and have eight ranks by default.
        flops_per_s: Peak dense FLOP/s of one rank at the precision of its GEMMs.
        compute_efficiency: Share of `flops_per_s` that grouped GEMMs of experts reach, in (0, 1].
        slot_overhead_s: Fixed time in seconds per pass and busy slot, for the launch of a small GEMM and for unfilled tiles.
        peer_bytes_per_s: Bandwidth between two ranks of a node.
        rdma_bytes_per_s: Bandwidth between one NIC and another node. The `nic_sharing` ranks of the NIC share it.
        host_bytes_per_s: Bandwidth from pinned host memory to one rank, or 0 if there are no host stores.
        peer_latency_s: Fixed time in seconds per copy inside a node.
        rdma_latency_s: Fixed time in seconds per copy between nodes.
        host_latency_s: Fixed time in seconds per copy from host memory.
        nic_sharing: Number of ranks that share one NIC.
        dispatch: How tokens are sent. With ``"pairs"``, every (token, expert) pair is sent, as in a plain all-to-all. With
            ``"node"``, as in DeepEP and HybridEP, a token is sent once to every node that serves it. There, the rank with the
            same local index forwards the token once to every rank that serves it.
        exchange_bytes_per_s: Bandwidth of ``"node"`` dispatch in a node, for one rank and direction. Defaults to that of copies.
        plain_bytes_per_s: Bandwidth of ``"pairs"`` dispatch in a node, a plain all-to-all. Defaults to that of copies.
        return_bytes_per_s: Bandwidth at which replica gradients are sent home and added there. Defaults to that of copies.
        copy_contention: Compute time lost per second of concurrent copying, in [0, 1].
        memory_bytes: Accelerator memory of one rank.
        memory_bytes_per_s: Bandwidth of that memory, which limits the optimizer. If None, the optimizer takes no time.
        attention_efficiency: Share of `flops_per_s` that attention reaches, in (0, 1]. Defaults to `compute_efficiency`.
        score_flops_per_s: FLOP/s that attention reaches for scores and values, regardless of the precision of GEMMs. Defaults to
            the FLOP/s of the projections.
        backward_ratio: Backward time of the experts divided by their forward time. The ratio is 2 for GEMMs alone.
        slot_backward_s: Fixed time in seconds per backward pass and busy slot, to read and write sums of weight gradients.
            Defaults to `backward_ratio` times `slot_overhead_s`.
        attention_backward_ratio: Backward time of attention and other work before the experts, divided by its forward time.
            Defaults to `backward_ratio`.
        layer_overhead_s: Fixed seconds per layer and forward pass for work besides attention and experts (router, norms,
            launches).
        pair_overhead_s: Seconds per (token, expert) pair and forward pass for work besides GEMMs (permutation, activation).
        element_overhead_s: Seconds of a layer's forward pass per element of a token's activation, for work besides GEMMs and
            scores (norms, residuals, router, permutation, activation, quantisation).
        tile_pairs: Number of pairs in a tile of a grouped GEMM. The pairs of a slot are rounded up to whole tiles.
        host_layer_s: Host time in seconds per layer and forward pass if the host cannot run ahead (see `foremoe.machine.host`).
        planned_layer_s: Seconds that a plan with replicas adds to each forward pass of a layer, because tokens are remapped.
        planned_token_s: Additional time in seconds per token of a rank for this remapping.
        precision: Label for the precision of GEMMs. Only `flops_per_s` and the overheads have an effect.
        calibrated: Whether the figures were fitted to measurements on real hardware and the fit passed `foremoe.calibrate.gate`.
        residual: Largest ``|fitted - measured| / measured`` of the fit, or None if there was no fit or the value is not known.
        source: Origin of the figures.

    Raises:
        InputError: A value has the wrong type or is out of range, or the node numbers have gaps.
    """

    name: str
    num_ranks: int
    # None is accepted as an argument only; the attribute is always an array.
    node_of_rank_G: Array = None  # type: ignore[assignment]
    flops_per_s: float
    compute_efficiency: float
    slot_overhead_s: float
    peer_bytes_per_s: float
    rdma_bytes_per_s: float
    host_bytes_per_s: float
    peer_latency_s: float
    rdma_latency_s: float
    host_latency_s: float
    nic_sharing: int = 1
    dispatch: str = "pairs"
    exchange_bytes_per_s: float | None = None
    plain_bytes_per_s: float | None = None
    return_bytes_per_s: float | None = None
    copy_contention: float
    memory_bytes: int
    memory_bytes_per_s: float | None = None
    attention_efficiency: float | None = None
    score_flops_per_s: float | None = None
    backward_ratio: float = 2.0
    slot_backward_s: float | None = None
    attention_backward_ratio: float | None = None
    layer_overhead_s: float = 0.0
    pair_overhead_s: float = 0.0
    element_overhead_s: float = 0.0
    tile_pairs: int = 1
    host_layer_s: float = 0.0
    planned_layer_s: float = 0.0
    planned_token_s: float = 0.0
    precision: str = "bf16"
    calibrated: bool = False
    residual: float | None = None
    source: str

    def __post_init__(self) -> None:
        fields.check_fields(self, CHECKS)
        if self.dispatch not in DISPATCHES:
            raise InputError(f"dispatch must be {' or '.join(DISPATCHES)}; got {self.dispatch!r}.")
        object.__setattr__(self, "node_of_rank_G", checked_nodes(self.node_of_rank_G, self.num_ranks))

    def __repr__(self) -> str:
        return f"Cluster({self.name!r}, {self.num_ranks} ranks, {self.ranks_per_node} per node, {self.dispatch}, {self.standing})"

    @classmethod
    def preset(
        cls, name: str, num_ranks: int = 8, ranks_per_node: int | None = None, *, dispatch: str = "pairs",
        host_store: bool = False, precision: str = "bf16",
    ) -> Self:  # fmt: skip
        """Returns a cluster of a shipped type with `num_ranks` ranks. `name` is not case-sensitive.

        Args:
            num_ranks: Any number of ranks. The last node may be smaller.
            ranks_per_node: Number of ranks per node. Defaults to the number in the preset.
            dispatch: Kind of dispatch, ``"pairs"`` or ``"node"``.
            host_store: Whether weights may come from host memory. If False, ``host_bytes_per_s`` is 0.
            precision: Precision of GEMMs, ``"bf16"``, or ``"fp8"`` if the GPU supports it.

        Raises:
            InputError: The preset does not exist (the message lists all presets), or a number is out of range.

        Example:
            >>> foremoe.Cluster.preset("8xh100", num_ranks=16).node_of_rank_G.tolist()
            [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]
        """
        table = at_precision(fields.preset(_FILE, name, "cluster"), precision)
        table |= {"num_ranks": num_ranks, "dispatch": dispatch}
        if not host_store:
            table["host_bytes_per_s"] = 0.0
        if ranks_per_node is not None:
            table["ranks_per_node"] = ranks_per_node
        return cls.from_dict(table)

    @classmethod
    def preset_names(cls) -> tuple[str, ...]:
        """Returns the names that `preset` accepts."""
        return fields.preset_names(_FILE)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], where: str = "cluster") -> Self:
        """Creates a cluster from a table of fields.

        The table has either ``num_ranks`` and ``ranks_per_node``, or a list ``node_of_rank`` with an optional ``num_ranks``.

        Raises:
            InputError: Keys are unknown or missing, or `Cluster` refuses a field. The message starts with `where`.
        """
        by_list = "node_of_rank" in table
        names = [name for name in cls.__dataclass_fields__ if name not in ("num_ranks", "node_of_rank_G")]
        known = [*names, "num_ranks", "ranks_per_node", "node_of_rank"]
        needed = [name for name in names if cls.__dataclass_fields__[name].default is dataclasses.MISSING]
        fields.check_keys(table, known, needed if by_list else [*needed, "num_ranks", "ranks_per_node"], where)
        if by_list and "ranks_per_node" in table:
            raise InputError(f"{where} has both ranks_per_node and node_of_rank; keep one of them.")
        with naming(where):
            if by_list:
                nodes = table["node_of_rank"]
                if not isinstance(nodes, list):
                    raise InputError("node_of_rank must be a list of node numbers, one per rank.")
                nodes = [fields.whole(node, f"node_of_rank[{g}]", 0, MAX_RANKS) for g, node in enumerate(nodes)]
                num_ranks, node_of_rank_G = table.get("num_ranks", len(nodes)), np.array(nodes, np.int32)
            else:
                num_ranks = table["num_ranks"]
                node_of_rank_G = nodes_in_order(num_ranks, table["ranks_per_node"])
            return cls(num_ranks=num_ranks, node_of_rank_G=node_of_rank_G, **{k: table[k] for k in names if k in table})

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a cluster from a file of `to_toml`. Raises InputError if the file is missing or `from_dict` refuses it."""
        return cls.from_dict(fields.read(path), where=repr(os.fspath(path)))

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain numbers, text and lists. ``Cluster.from_dict(c.to_dict()).same_as(c)`` is True.

        The field ``dispatch`` and the fields that only a fit can determine are left out if they have their default values.
        """
        table: dict[str, Any] = {"name": self.name, "num_ranks": self.num_ranks}
        if np.array_equal(self.node_of_rank_G, nodes_in_order(self.num_ranks, self.ranks_per_node)):
            table["ranks_per_node"] = self.ranks_per_node
        else:
            table["node_of_rank"] = self.node_of_rank_G.tolist()
        default = {field.name: field.default for field in dataclasses.fields(self)}
        return table | {key: x for key, x in fields.scalars(self).items() if key not in OPTIONAL or x != default[key]}

    def to_toml(self, path: str | os.PathLike[str]) -> None:
        """Writes the cluster to a TOML file."""
        fields.write(path, self.to_dict())

    def with_ranks(self, num_ranks: int, ranks_per_node: int) -> Self:
        """Returns a cluster with the same speeds and another number of ranks, which fill nodes of `ranks_per_node` in order.

        The new cluster does not count as calibrated if it has a kind of link (inside or between nodes) that was not measured.
        """
        other = dataclasses.replace(self, num_ranks=num_ranks, node_of_rank_G=nodes_in_order(num_ranks, ranks_per_node))
        linked = other.num_nodes <= self.num_nodes and (other.ranks_per_node == 1 or self.ranks_per_node > 1)
        return dataclasses.replace(other, calibrated=self.calibrated and linked)

    @property
    def standing(self) -> str:
        """Text that says whether predicted times are calibrated and, if known, how large their error is."""
        if self.residual is None:
            error = f"median error {100 * TYPICAL_ERROR:.0f} %"
            return "calibrated, residual not recorded" if self.calibrated else f"uncalibrated, {error}"
        return f"{'calibrated' if self.calibrated else 'fitted, not calibrated'}, residual {self.residual:.0%}"

    @property
    def num_nodes(self) -> int:
        """Number of nodes that hold at least one rank."""
        return int(self.node_of_rank_G.max()) + 1

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on the fullest node."""
        return int(np.bincount(self.node_of_rank_G).max())

    @property
    def nic_of_rank_G(self) -> Array:
        """int64 [G], the NIC of every rank. In rank order, each group of `nic_sharing` ranks of a node shares one NIC."""
        nic_G, first = np.empty(self.num_ranks, np.int64), 0
        for node in range(self.num_nodes):
            ranks = np.flatnonzero(self.node_of_rank_G == node)
            nic_G[ranks] = first + np.arange(len(ranks)) // self.nic_sharing
            first = int(nic_G[ranks].max()) + 1
        return nic_G

    @property
    def expert_flops_per_s(self) -> float:
        """FLOP/s that the expert GEMMs of one rank reach."""
        return self.flops_per_s * self.compute_efficiency

    @property
    def attention_flops_per_s(self) -> float:
        """FLOP/s that the attention of one rank reaches."""
        return self.flops_per_s * (self.compute_efficiency if self.attention_efficiency is None else self.attention_efficiency)

    @property
    def backward_slot_s(self) -> float:
        """Fixed time in seconds per busy slot in the backward pass."""
        return self.backward_ratio * self.slot_overhead_s if self.slot_backward_s is None else self.slot_backward_s

    @property
    def window_backward_ratio(self) -> float:
        """Backward time of attention and other work before the experts, divided by its forward time."""
        return self.backward_ratio if self.attention_backward_ratio is None else self.attention_backward_ratio

    @property
    def exchange_latency_s(self) -> float:
        """Fixed time in seconds of an exchange between all ranks, set by the slowest kind of link. It is 0 for one rank."""
        if self.num_ranks == 1:
            return 0.0
        return self.rdma_latency_s if self.num_nodes > 1 else self.peer_latency_s

    @property
    def kernel_bytes_per_s(self) -> float:
        """Bandwidth that an exchange reaches inside a node, for one rank and direction."""
        own = self.exchange_bytes_per_s if self.dispatch == "node" else self.plain_bytes_per_s
        return self.peer_bytes_per_s if own is None else own

    @property
    def rdma_bytes_per_s_per_rank(self) -> float:
        """Bandwidth between nodes for one rank and direction if all ranks that share its NIC send at once."""
        return self.rdma_bytes_per_s / self.nic_sharing

    def copy_seconds(self, num_bytes: float) -> tuple[float, float, float]:
        """Returns the seconds to copy `num_bytes` inside a node, between nodes, and from a host store (inf if there is none)."""
        return (
            num_bytes / self.peer_bytes_per_s + self.peer_latency_s,
            num_bytes / self.rdma_bytes_per_s_per_rank + self.rdma_latency_s,
            num_bytes / self.host_bytes_per_s + self.host_latency_s if self.host_bytes_per_s > 0 else np.inf,
        )

    def return_seconds(self, num_bytes: float) -> tuple[float, float]:
        """Returns the seconds to send a replica gradient of `num_bytes` home, inside a node and between nodes."""
        own = np.inf if self.return_bytes_per_s is None else self.return_bytes_per_s
        peer, rdma = min(self.peer_bytes_per_s, own), min(self.rdma_bytes_per_s_per_rank, own)
        return num_bytes / peer + self.peer_latency_s, num_bytes / rdma + self.rdma_latency_s
