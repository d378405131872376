"""LAMB: Adam with steps as long as the parameter times the learning rate (You et al. 2019)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gems.autograd.torch_internals import foreach


class Lamb(Optimizer):
    """Layer-wise adaptive moments for large batches, with Adam's bias correction.

    This is algorithm 2 of arXiv:1904.00962. The trust ratio is computed for each parameter tensor,
    so it does not depend on how the model is cut into stages. Parameters without weight decay take
    Adam's step.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step and return the closure's loss, or None without a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._step(parameters, group)
        return loss

    def _step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Change the parameters of a group together: on a GPU, by few kernels for all of them."""
        states = [self.state[parameter] for parameter in parameters]
        for state, parameter in zip(states, parameters, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = (
                    torch.zeros_like(parameter),
                    torch.zeros_like(parameter),
                )
            state["step"] += 1
        counts = [float(state["step"]) for state in states]  # on the host
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        gradients = [parameter.grad for parameter in parameters]
        beta1, beta2 = group["betas"]
        foreach("lerp_")(means, gradients, 1 - beta1)
        for square in squares:  # lists would round the number to 16 bits on a processor
            square.mul_(beta2)
        foreach("addcmul_")(squares, gradients, gradients, value=1 - beta2)
        scales = foreach("div")(squares, [1 - beta2**count for count in counts])
        foreach("sqrt_")(scales)
        foreach("add_")(scales, group["eps"])
        updates = foreach("div")(means, [1 - beta1**count for count in counts])
        foreach("div_")(updates, scales)
        rates: Sequence[Tensor | float] = [group["lr"]] * len(updates)
        if group["weight_decay"]:
            foreach("add_")(updates, parameters, alpha=group["weight_decay"])
            lengths = torch.stack(foreach("norm")(parameters))
            step_lengths = torch.stack(foreach("norm")(updates))
            is_positive = (lengths > 0) & (step_lengths > 0)
            ratios = torch.where(is_positive, lengths / step_lengths, torch.ones_like(lengths))
            rates = (group["lr"] * ratios).unbind()
        for update, rate in zip(updates, rates, strict=True):
            update.mul_(rate)
        foreach("sub_")(parameters, updates)
