"""Channels for tensors in torch.channels_last, which travel as they are in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gems.engine.transport.p2p_channels import P2PChannels
from gems.models.build import TensorSpec
from gems.schedule.action import Action


class ChannelsLast(P2PChannels):
    """Sends tensors (N, C, H, W) in the memory order (N, H, W, C) of torch.channels_last.

    So neither side copies them. Tensors in another format, which for example cuDNN uses in float64,
    are converted when they are sent.
    """

    @staticmethod
    def spec_in_memory(spec: TensorSpec) -> TensorSpec:
        """Return a tensor's shape in the order of memory in which it travels."""
        if len(spec.shape) != 4:
            return spec
        samples, channels, height, width = spec.shape
        return replace(spec, shape=(samples, height, width, channels))

    def wait(self, action: Action) -> tuple[torch.Tensor, ...]:
        """Wait for a posted receive and return its tensors (N, C, H, W), views of the buffers."""
        return tuple(
            tensor.permute(0, 3, 1, 2) if tensor.dim() == 4 else tensor
            for tensor in super().wait(action)
        )

    def post_send(self, action: Action, tensors: Sequence[torch.Tensor]) -> None:
        """Post the tensors of a SEND_F or SEND_B."""
        super().post_send(action, [_in_memory(_in_format(tensor)) for tensor in tensors])

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Release received tensors that nothing reads any more."""
        super().release(list(map(_in_memory, tensors)))


def _in_format(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor
