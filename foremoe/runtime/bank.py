"""`ExpertBank`: the experts of several MoE layers on one rank, with main gradients and slot buffers."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from foremoe.base.arrays import sealed
from foremoe.base.errors import InputError
from foremoe.distributed.group import Group
from foremoe.runtime.experts import ExpertMath, SwiGLU
from foremoe.transfer.base import Tensors

# Letters: L layers, E experts, B base slots, G ranks; X slot buffers.


class ExpertBank(nn.Module):
    """Experts at home on one rank, as a module that implements `Buffers`.

    A parameter is named ``NAME_LAYER`` and has the shape ``[B, *shape]``, with one entry per base slot of the rank. Gradients are
    accumulated in `main_grad`, which is float32, or float64 if the weights are float64. After a stage with a backward pass,
    ``param.grad`` refers to this memory, or to a copy if the dtypes differ, so any torch optimizer can step. Gradients accumulate
    over stages until they are dropped, either by `zero_grad` or by an optimizer's ``zero_grad()`` with its default,
    ``set_to_none=True``.

    Args:
        rank: Rank in the EP group.
        num_ranks: Number of ranks of the EP group, which must divide `num_experts`.
        num_buffers: Number of slot buffers for replicas, from ``plan.header.num_buffers``. Each buffer holds one expert.
        home_LE: Home slot g*B + b of every expert. Defaults to contiguous homes.
        device: Device of the weights and slot buffers. Neither can be moved afterwards.
        seed: Seed of the initial weights. They depend on the seed, the layer and the expert but not on the number of ranks.
        math: Computation that each expert performs.

    Raises:
        InputError: The sizes do not match.
    """

    def __init__(
        self, *, num_layers: int, num_experts: int, hidden_size: int, ffn_size: int, rank: int = 0, num_ranks: int = 1,
        num_buffers: int = 0, home_LE: npt.ArrayLike | None = None, dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None, seed: int = 0, math: ExpertMath | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if num_ranks < 1 or num_experts < 1 or num_experts % num_ranks or rank not in range(num_ranks):
            given = f"{num_experts} experts on {num_ranks} ranks, of which this is {rank}"
            raise InputError(f"{given}, do not fit; the ranks must divide the experts, and rank must be below num_ranks.")
        if num_layers < 1 or num_buffers < 0:
            raise InputError(f"an ExpertBank needs at least 1 layer and 0 buffers; got {num_layers} and {num_buffers}.")
        self.num_layers, self.num_experts, self.num_buffers = num_layers, num_experts, num_buffers
        self.dtype, self.device = dtype, torch.empty(0, device=device).device
        self.rank, self.num_ranks, self.num_base = rank, num_ranks, num_experts // num_ranks
        self.math: ExpertMath = SwiGLU() if math is None else math
        self.shapes = self.math.shapes(hidden_size, ffn_size)
        self.runs: dict[tuple[int, ...], list[Any]] = {}  # cache of `Row.runs`, valid because the memory of a bank does not move
        home = np.tile(np.arange(num_experts), (num_layers, 1)) if home_LE is None else np.array(home_LE)
        if home.shape != (num_layers, num_experts) or (np.sort(home, axis=1) != np.arange(num_experts)).any():
            raise InputError(f"home_LE must hold, for each of {num_layers} layers, a permutation of {num_experts} home slots.")
        self.home_LE = sealed(home.astype(np.int32))
        self.expert_LB = np.argsort(home, axis=1)[:, rank * self.num_base : (rank + 1) * self.num_base]

        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._main: dict[str, torch.Tensor] = {}
        self._home_LB: list[list[Tensors]] = []
        self._main_LB: list[list[Tensors]] = []
        for layer in range(num_layers):
            homes, mains = [], []
            for name, shape in self.shapes.items():
                weight = nn.Parameter(torch.empty(self.num_base, *shape, dtype=dtype, device=device))
                self.register_parameter(f"{name}_{layer}", weight)
                main = self._main[f"{name}_{layer}"] = torch.zeros(self.num_base, *shape, dtype=wide, device=device)
                # detach() instead of .data, because views must share the version counter that reveals writes to the weights.
                homes.append(weight.detach().view(self.num_base, -1).unbind())
                mains.append(main.view(self.num_base, -1).unbind())
            self._home_LB.append(list(zip(*homes, strict=True)))
            self._main_LB.append(list(zip(*mains, strict=True)))
        sizes = [int(np.prod(shape)) for shape in self.shapes.values()]
        self._slot_X, self._slot_grad_X = (
            list(zip(*(torch.zeros(num_buffers, n, dtype=d, device=device).unbind() for n in sizes), strict=True))
            for d in (dtype, wide)
        )
        self._draw(seed)

    def home(self, layer: int, expert: int) -> Tensors:
        """Returns the flat weights of an expert whose home is this rank."""
        return self._home_LB[layer][self._base_slot(layer, expert)]

    def slot(self, buffer: int) -> Tensors:
        """Returns the flat weights in a buffer."""
        return self._slot_X[buffer]

    def main_grad(self, layer: int, expert: int) -> Tensors:
        """Returns the flat main gradients of an expert whose home is this rank."""
        return self._main_LB[layer][self._base_slot(layer, expert)]

    def slot_grad(self, buffer: int) -> Tensors:
        """Returns the flat gradient of the replica in a buffer."""
        return self._slot_grad_X[buffer]

    def drop_stale_gradients(self) -> None:
        """Zeroes main gradients of parameters whose ``grad`` was dropped or zeroed. Called by `Runtime` when a stage begins."""
        for name, param in self.named_parameters():
            if param.grad is None or not param.grad.any():
                self._main[name].zero_()

    def publish_gradients(self) -> None:
        """Sets ``param.grad`` to the main gradient. Called by `Runtime` when a stage with a backward pass ends."""
        for name, param in self.named_parameters():
            param.grad = self._main[name].to(param.dtype)  # the same tensor if dtypes agree

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the main gradients. Drops ``param.grad`` if `set_to_none` is True and zeroes it otherwise."""
        for main in self._main.values():
            main.zero_()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copies this rank's part of the model's weights into the bank.

        Args:
            weights: Mapping from parameter name to a tensor ``[L, E, *shape]`` indexed by logical expert, as returned by
                `gather`.

        Raises:
            InputError: The names or shapes do not match.
        """
        for name, shape in self.shapes.items():
            wanted = (self.num_layers, self.num_experts, *shape)
            if name not in weights or tuple(weights[name].shape) != wanted:
                got = tuple(weights[name].shape) if name in weights else "nothing"
                raise InputError(f"weights[{name!r}] must have shape {wanted}; got {got}.")
            for layer in range(self.num_layers):
                self.get_parameter(f"{name}_{layer}").copy_(weights[name][layer, torch.from_numpy(self.expert_LB[layer])])

    @torch.no_grad()
    def gather(self, group: Group, *, gradients: bool = False) -> dict[str, torch.Tensor]:
        """Gathers the weights or the main gradients of all experts on every rank. Collective.

        Returns:
            Mapping from parameter name to a tensor ``[L, E, *shape]`` indexed by logical expert.
        """
        everything = {}
        for name, shape in self.shapes.items():
            by_layer = []
            for layer in range(self.num_layers):
                key = f"{name}_{layer}"
                mine = (self._main[key] if gradients else self.get_parameter(key).detach()).view(self.num_base, -1)
                by_home = mine.new_empty(self.num_experts, mine.shape[1])
                each = [self.num_base] * self.num_ranks
                group.all_to_all(by_home, mine.repeat(self.num_ranks, 1), each, each)
                home_E = torch.from_numpy(self.home_LE[layer].astype(np.int64)).to(mine.device)
                by_layer.append(by_home.index_select(0, home_E).view(self.num_experts, *shape))
            everything[name] = torch.stack(by_layer)
        return everything

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        for param in self.parameters():
            with torch.no_grad():
                moved = fn(param)
            if moved.data_ptr() != param.data_ptr() or moved.dtype != param.dtype or moved.device != param.device:
                raise InputError("the memory of an ExpertBank cannot move; give dtype and device when making it.")
        return self

    def _base_slot(self, layer: int, expert: int) -> int:
        rank, slot = divmod(int(self.home_LE[layer, expert]), self.num_base)
        if rank != self.rank:
            raise InputError(f"expert {expert} of layer {layer} is at home on rank {rank}, not here on rank {self.rank}.")
        return slot

    @torch.no_grad()
    def _draw(self, seed: int) -> None:
        """Draws matrices from a normal distribution with variance 1 / rows, in float32 for all dtypes. Other tensors are zero."""
        generator = torch.Generator()
        for layer in range(self.num_layers):
            for b, expert in enumerate(self.expert_LB[layer].tolist()):
                generator.manual_seed(int(np.random.SeedSequence([seed, layer, expert]).generate_state(1, np.uint64)[0] >> 1))
                for name, shape in self.shapes.items():
                    weight = self.get_parameter(f"{name}_{layer}")[b]
                    if len(shape) == 2:
                        weight.copy_(torch.randn(shape, generator=generator) / shape[0] ** 0.5)
                    else:
                        weight.zero_()
