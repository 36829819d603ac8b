"""Routed experts as torch computes them in float64: every token goes through every expert."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Problem:
    """The inputs of a layer of experts, and the gradient of its output. Without gate_EDF, the experts have no gate."""

    x_BTD: np.ndarray
    weights_BTk: np.ndarray
    experts_BTk: np.ndarray
    gate_EDF: np.ndarray | None
    in_EDF: np.ndarray
    out_EFD: np.ndarray
    dy_BTD: np.ndarray
    # of gate, in and out; None: no bias
    biases: tuple[np.ndarray | None, ...] = (None, None, None)

    @classmethod
    def random(cls, *shape: int, d: int, f: int, experts: int, chosen: int, empty: tuple[int, ...] = ()) -> "Problem":
        """Of `shape` tokens; no token chooses the experts `empty`, and the lower numbers are chosen more often."""
        rng = np.random.default_rng(0)

        def normal(*size: int) -> np.ndarray:
            return rng.normal(size=size).astype(np.float32)

        popular = np.array([0.0 if e in empty else 1 / (1 + e) for e in range(experts)])
        choices = [
            rng.choice(experts, chosen, replace=False, p=popular / popular.sum()) for _ in range(int(np.prod(shape)))
        ]
        return cls(
            normal(*shape, d),
            rng.random((*shape, chosen)).astype(np.float32),
            np.array(choices, np.int32).reshape(*shape, chosen),
            normal(experts, d, f) / d**0.5,
            normal(experts, d, f) / d**0.5,
            normal(experts, f, d) / f**0.5,
            normal(*shape, d),
        )

    def with_biases(self, *, gated: bool) -> "Problem":
        """The same with biases, and with or without a gate."""
        rng, (experts, d, f) = np.random.default_rng(1), self.in_EDF.shape
        gate, *others = (rng.normal(size=(experts, size)).astype(np.float32) for size in (f, f, d))
        biases = (gate if gated else None, *others)
        return dataclasses.replace(self, gate_EDF=self.gate_EDF if gated else None, biases=biases)

    @property
    def parameters(self) -> list[np.ndarray | None]:
        """Those of all experts, in the order of `split`."""
        return [self.gate_EDF, self.in_EDF, self.out_EFD, *self.biases]

    @property
    def inputs(self) -> tuple[np.ndarray, ...]:
        """What a gradient exists of."""
        return self.x_BTD, self.weights_BTk, *(one for one in self.parameters if one is not None)

    def split(self, given: Any) -> tuple[list[Any], list[Any]]:
        """The matrices of gate, in and out, and their biases, from the parameters that are not None."""
        each = iter(given)
        every = [None if one is None else next(each) for one in self.parameters]
        return every[:3], every[3:]

    def dense(self, kept_BTk: Any = 1.0) -> tuple[np.ndarray, list[np.ndarray]]:
        """The output and the gradients of all `inputs`, with silu; only the choices `kept_BTk` count."""
        import torch

        inputs = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in self.inputs]
        x, weights, *parameters = inputs
        (gate, in_, out), (gate_b, in_b, out_b) = self.split(parameters)

        def product(x: Any, pattern: str, w: Any, b: Any) -> Any:
            y = torch.einsum(pattern, x, w)
            return y if b is None else y + b

        hidden = product(x, "btd,edf->btef", in_, in_b)
        silu = torch.nn.functional.silu
        hidden = silu(hidden) if gate is None else silu(product(x, "btd,edf->btef", gate, gate_b)) * hidden
        chosen = torch.nn.functional.one_hot(torch.tensor(self.experts_BTk).long(), len(in_)).double()
        by_expert = torch.einsum("btke,btk->bte", chosen, weights * torch.as_tensor(kept_BTk))
        y = torch.einsum("bted,bte->btd", product(hidden, "btef,efd->bted", out, out_b), by_expert)
        y.backward(torch.tensor(self.dy_BTD, dtype=torch.float64))
        return y.detach().numpy(), [a.grad.numpy() for a in inputs]

    def kept(self, factor: float, batch: int = 1, seq: int = 1) -> np.ndarray:
        """Which choices fit, on devices that split the tokens into `batch` x `seq` parts: on each device, the first
        choices of all its tokens take their places before the second."""
        sequences, positions, chosen = self.experts_BTk.shape
        fits, experts = np.zeros(self.experts_BTk.shape), len(self.in_EDF)
        rows, columns = sequences // batch, positions // seq
        capacity = int(np.ceil(factor * rows * columns * chosen / experts))
        for b, t in np.ndindex(batch, seq):
            used = np.zeros(experts, int)
            for j, row, column in np.ndindex(chosen, rows, columns):
                at = b * rows + row, t * columns + column, j
                fits[at] = used[self.experts_BTk[at]] < capacity
                used[self.experts_BTk[at]] += 1
        return fits


def relative_differences(ours: list[Any], others: list[Any]) -> list[float]:
    """The largest difference of each array, relative to its largest value."""
    return [float(np.abs(np.asarray(a) - b).max() / np.abs(b).max()) for a, b in zip(ours, others, strict=True)]
