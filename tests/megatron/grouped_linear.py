"""Transformer Engine's grouped linear in torch alone, with its interface, for `TEGroupedMLP` on a CPU; no part of foremoe."""

import torch


class GroupedLinear(torch.nn.Module):
    """One matrix [out, in] per expert, ``weight0`` and so on, and maybe a ``bias0``; takes the sizes of its parts as a list."""

    def __init__(self, num_gemms, input_size, output_size, *, config, bias=False, skip_bias_add=True, **_):
        super().__init__()
        self.num_gemms, self.use_bias, self.config = num_gemms, bias, config
        self.te_return_bias = bias and skip_bias_add
        for i in range(num_gemms):
            weight = torch.nn.Parameter(torch.randn(output_size, input_size, dtype=config.params_dtype) * 0.2)
            weight.allreduce = False
            self.register_parameter(f"weight{i}", weight)
        for i in range(num_gemms if bias else 0):
            self.register_parameter(f"bias{i}", torch.nn.Parameter(torch.zeros(output_size, dtype=config.params_dtype)))
            getattr(self, f"bias{i}").allreduce = False

    def forward(self, x, m_splits):
        assert isinstance(m_splits, list) and len(m_splits) == self.num_gemms
        product = _Product.apply(x, m_splits, self.sums(), *(self.weight(i) for i in range(self.num_gemms)))
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)] if self.use_bias else None
        if biases is None or self.te_return_bias:
            return product, biases
        return torch.cat([part + bias for part, bias in zip(product.split(m_splits), biases, strict=True)]), None

    def sums(self):
        """Where backward adds the gradients of weights; None: it returns them."""

    def weight(self, i):
        return getattr(self, f"weight{i}")


class Fused(GroupedLinear):
    """Adds weight gradients to `main_grad` in float32; the config's option would ask Megatron's other layers for CUDA kernels."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.fuse_wgrad_accumulation = True

    def sums(self):
        fuses = self.fuse_wgrad_accumulation and torch.is_grad_enabled()
        return [self.weight(i).main_grad for i in range(self.num_gemms)] if fuses else None


class Quantized(GroupedLinear):
    """Computes with weights of four bits, as quantisation-aware training has it."""

    def weight(self, i):
        weight = getattr(self, f"weight{i}")
        step = weight.detach().abs().max() / 7
        return weight + ((weight.detach() / step).round() * step - weight.detach())


class LoRA(torch.nn.Module):
    """A frozen grouped linear and an adapter beside it."""

    def __init__(self, *args, config, **options):
        super().__init__()
        self.to_wrap = GroupedLinear(*args, config=config, **options).requires_grad_(False)
        _, inputs, outputs = args
        self.adapter = torch.nn.Parameter(torch.randn(outputs, inputs, dtype=config.params_dtype) * 0.01)

    def forward(self, x, m_splits):
        return self.to_wrap(x, m_splits)[0] + x @ self.adapter.t(), None


class Adapted(GroupedLinear):
    """A grouped linear with an adapter of its own; nothing is frozen, and the class looks the same from outside."""

    def __init__(self, *args, config, **options):
        super().__init__(*args, config=config, **options)
        self.adapter = torch.nn.Parameter(torch.randn(args[2], args[1], dtype=config.params_dtype) * 0.01)

    def forward(self, x, m_splits):
        return super().forward(x, m_splits)[0] + x @ self.adapter.t(), None


class Activation(torch.nn.Module):
    """An activation as a module, as `use_te_activation_func` has it."""

    def __init__(self, config):
        super().__init__()

    def forward(self, x):
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, splits, sums, *weights):
        ctx.save_for_backward(x, *weights)
        ctx.splits, ctx.sums, ctx.weights = splits, sums, weights
        return torch.cat([part @ weight.t() for part, weight in zip(x.split(splits), weights, strict=True)])

    @staticmethod
    def backward(ctx, grad):
        x, *weights = ctx.saved_tensors
        parts = grad.split(ctx.splits)
        grad_x = torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])
        factors = [(part.t(), mine) for part, mine in zip(parts, x.split(ctx.splits), strict=True)]
        if ctx.sums is None:
            return grad_x, None, None, *(left @ right for left, right in factors)
        for total, (left, right) in zip(ctx.sums, factors, strict=True):
            total.add_(left.float() @ right.float())
        return grad_x, None, None, *map(_told, ctx.weights)


def _told(weight):
    """What autograd gets of a gradient that is in `main_grad` already: something, if Megatron asks to be told."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.full_like(weight, float("nan"))
