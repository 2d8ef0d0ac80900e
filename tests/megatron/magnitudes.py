"""How large the terms are that sum up to expert weight gradients: what bounds of rounding errors are made of."""

from functools import partial

import cpu
import torch
import torch.distributed as dist


class Magnitudes:
    """Records A = sum |x*g| for every element of every expert weight of a program that runs without foremoe.

    x is the input of the matrix and g the gradient of its output for a token; the sum runs over what sums up to the gradient:
    tokens and micro-steps, and the ranks over which gradients are reduced. Use as a context.
    """

    def __init__(self, program):
        self._program = program
        self._sums = {}
        self._hooks = []

    def __enter__(self):
        names = {p: f"{c}.{n}" for c, m in enumerate(self._program.bare) for n, p in m.named_parameters()}
        grouped = {}  # where the weights of `GroupedMLP` lie -> name
        for layer in (layer for m in self._program.bare for layer in m.decoder.layers):
            experts = getattr(layer.mlp, "experts", None)
            for expert in getattr(experts, "local_experts", ()):
                for linear in (expert.linear_fc1, expert.linear_fc2):
                    hook = lambda linear, args, out: self._sequential(names, linear, args[0], out[0])  # noqa: E731
                    self._hooks.append(linear.register_forward_hook(hook))
            for linear in (x for x in (getattr(experts, f"linear_fc{n}", None) for n in (1, 2)) if hasattr(x, "num_gemms")):
                self._hooks.append(linear.register_forward_hook(partial(self._engine, names)))
            for name in ("weight1", "weight2"):
                if hasattr(experts, name):
                    grouped[getattr(experts, name).data_ptr()] = names[getattr(experts, name)]
        cpu.GroupedGemm.watch = lambda x, weights, *rest: self._grouped(grouped[weights.data_ptr()], x, weights, *rest)
        return self

    def __exit__(self, *_):
        cpu.GroupedGemm.watch = None
        for hook in self._hooks:
            hook.remove()

    def take(self):
        """Name -> A of the step that is over, scaled as DDP scales gradients; collective."""
        ps = self._program.ps
        taken, self._sums = self._sums, {}
        shapes = {f"{c}.{n}": p.shape for c, m in enumerate(self._program.bare) for n, p in m.named_parameters()}
        for name in sorted(shapes):
            if ".experts." in name:
                total = taken.setdefault(name, torch.zeros(shapes[name], dtype=torch.float64))
                dist.all_reduce(total, group=ps.get_expert_data_parallel_group())
        return {name: total.view(shapes[name]) / ps.get_data_parallel_world_size() for name, total in taken.items()}

    def _sequential(self, names, linear, x, output):
        total = self._sums.setdefault(names[linear.weight], torch.zeros(output.shape[1], x.shape[1], dtype=torch.float64))
        x = x.detach().double().abs()
        if output.requires_grad:  # not in the first forward of a recomputed layer
            output.register_hook(lambda grad: _add(total, grad.double().abs().t() @ x))
            if linear.bias is not None:
                output.register_hook(partial(self._bias, names[linear.bias]))

    def _bias(self, name, grad):
        """A bias counts as the weight of an input of 1, as the router's probabilities are no larger."""
        _add(self._sums.setdefault(name, torch.zeros(grad.shape[1], dtype=torch.float64)), grad.double().abs().sum(0))

    def _engine(self, names, linear, args, out):
        x, num_rows = args
        totals = [
            self._sums.setdefault(names[linear.weight(i)], torch.zeros(out[0].shape[1], x.shape[1], dtype=torch.float64))
            for i in range(linear.num_gemms)
        ]
        xs = x.detach().double().abs().split(num_rows)

        def add(grad):
            for i, (total, mine, g) in enumerate(zip(totals, xs, grad.double().abs().split(num_rows), strict=True)):
                _add(total, g.t() @ mine)
                if linear.use_bias:
                    self._bias(names[getattr(linear, f"bias{i}")], g)

        if out[0].requires_grad:
            out[0].register_hook(add)

    def _grouped(self, name, x, weights, num_rows, output):
        total = self._sums.setdefault(name, torch.zeros(weights.shape, dtype=torch.float64))
        x = x.detach().double().abs()

        def add(grad):
            for e, (mine, g) in enumerate(zip(x.split(num_rows), grad.double().abs().split(num_rows), strict=True)):
                _add(total[e], mine.t() @ g)

        if output.requires_grad:
            output.register_hook(add)


def _add(total, part):
    """Returns None: what a hook returns would replace the gradient."""
    total.add_(part)
