"""How far a float32 stage may lie from the exact result, whatever the order of its sums: a first-order running error analysis.

Every quantity is carried as its exact value v (float64 here, whose own rounding is 2^-29 of float32's) and a bound b on the error
of the computed one. With u = 2^-24, one operation rounds by at most u times the result; a sum of n products, in any order and
grouping, with or without fused multiply-add, errs by at most g(n) = n u / (1 - n u) times the sum of the products' magnitudes. So
a result by a plan (other slots, other GEMM shapes, gradients added replica by replica) and the dense one both lie within b of v,
and within 2 b of each other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Letters: N pairs of an expert, H hidden size, F ffn size.

U = 2.0**-24
# Of the sigmoid, relative: exp, an addition and a division, a few units in the last place each.
SIGMOID = 8 * U


class Bounded(NamedTuple):
    """An exact value and a bound on the error of what is computed for it."""

    v: torch.Tensor
    b: torch.Tensor

    @staticmethod
    def exact(v: torch.Tensor) -> Bounded:
        return Bounded(v, torch.zeros_like(v))

    @property
    def size(self) -> torch.Tensor:
        return self.v.abs() + self.b

    @property
    def T(self) -> Bounded:
        return Bounded(self.v.T, self.b.T)

    def __getitem__(self, index: object) -> Bounded:
        return Bounded(self.v[index], self.b[index])  # type: ignore[index]

    def __mul__(self, other: Bounded) -> Bounded:
        v = self.v * other.v
        error = self.size * other.size - v.abs()
        return Bounded(v, error + U * self.size * other.size)

    def __add__(self, other: Bounded) -> Bounded:
        v = self.v + other.v
        return Bounded(v, self.b + other.b + U * (v.abs() + self.b + other.b))

    def __neg__(self) -> Bounded:
        return Bounded(-self.v, self.b)

    def matmul(self, other: Bounded, extra: int = 0) -> Bounded:
        """A product summed over n terms; `extra` more additions where it is added up part by part."""
        v = self.v @ other.v
        magnitude = self.size @ other.size
        inherited = magnitude - self.v.abs() @ other.v.abs()
        return Bounded(v, inherited + gamma(self.v.shape[1] + extra) * magnitude)

    def sigmoid(self) -> Bounded:
        v = torch.sigmoid(self.v)
        return Bounded(v, 0.25 * self.b + SIGMOID * v)  # its slope is at most 1/4

    def sum(self, dim: int) -> Bounded:
        return Bounded(self.v.sum(dim), self.b.sum(dim) + gamma(self.v.shape[dim]) * self.size.sum(dim))


def gamma(n: int) -> float:
    return n * U / (1 - n * U)


class Expert(NamedTuple):
    """An expert's pairs, computed: outputs, gradients of inputs and of weights."""

    y_NH: Bounded
    grad_x_NH: Bounded
    grad_gate_up: Bounded
    grad_down: Bounded


def expert(x_NH: torch.Tensor, grad_y_NH: Bounded, gate_up: torch.Tensor, down: torch.Tensor, extra: int) -> Expert:
    """SwiGLU forward and backward; `extra` is how often partial sums of weight gradients are added up at most."""
    x, w1, w2 = Bounded.exact(x_NH), Bounded.exact(gate_up), Bounded.exact(down)
    pre, F = x.matmul(w1), down.shape[0]
    gate, up = pre[:, :F], pre[:, F:]
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    act = silu * up
    grad_act = grad_y_NH.matmul(w2.T)
    one = Bounded.exact(torch.ones_like(gate.v))
    slope = sigmoid * (one + gate * (one + -sigmoid))
    grad_gate, grad_up = grad_act * up * slope, grad_act * silu
    grad_pre = Bounded(torch.cat([grad_gate.v, grad_up.v], dim=1), torch.cat([grad_gate.b, grad_up.b], dim=1))
    return Expert(act.matmul(w2), grad_pre.matmul(w1.T), x.T.matmul(grad_pre, extra), act.T.matmul(grad_y_NH, extra))
