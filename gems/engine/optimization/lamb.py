"""LAMB: Adam with steps as long as the parameter times the learning rate (You et al. 2019)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


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
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)
        return loss

    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = (
                torch.zeros_like(parameter),
                torch.zeros_like(parameter),
            )
        state["step"] += 1
        count, (beta1, beta2) = float(state["step"]), group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        scale = (state["exp_avg_sq"] / (1 - beta2**count)).sqrt_().add_(group["eps"])
        update = (state["exp_avg"] / (1 - beta1**count)).div_(scale)
        rate: Tensor | float = group["lr"]
        if group["weight_decay"]:
            update.add_(parameter, alpha=group["weight_decay"])
            length = parameter.norm()
            step_length = update.norm()
            is_positive = (length > 0) & (step_length > 0)
            rate = group["lr"] * torch.where(
                is_positive, length / step_length, torch.ones_like(length)
            )
        parameter.sub_(update.mul_(rate))
