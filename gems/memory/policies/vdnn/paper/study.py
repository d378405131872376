"""One network of the vDNN paper on one device: what it needs without vDNN, and a step under each policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gems.memory.policies.vdnn.paper.calls import Network
from gems.memory.policies.vdnn.paper.device import Device
from gems.memory.policies.vdnn.paper.timeline import Policy, Timeline, play
from gems.memory.policies.vdnn.paper.workspace import workspace_bytes

PARAM_COPIES = 2  # the parameters and their gradients


@dataclass(frozen=True, slots=True)
class Study:
    """The bytes of the baseline, which allocates all of a step at its start, and the step of each policy.

    `maps_bytes` are the images and all feature maps, `gradients_bytes` the two buffers that all gradient maps share,
    `workspace_bytes` the one that all convolutions share, `params_bytes` parameters and their gradients.
    """

    maps_bytes: int
    gradients_bytes: int
    workspace_bytes: int
    params_bytes: int
    steps: Mapping[Policy, Timeline]

    @property
    def total_bytes(self) -> int:
        """Bytes of the baseline without workspace: maps, gradient maps, parameters and their gradients."""
        return self.maps_bytes + self.gradients_bytes + self.params_bytes

    @property
    def managed_bytes(self) -> int:
        """What of the baseline vDNN manages: maps, gradient maps and workspace, not parameters, not the classifier."""
        return self.maps_bytes + self.gradients_bytes + self.workspace_bytes

    @property
    def feature_share(self) -> float:
        """The share of what vDNN manages in all that the baseline allocates."""
        return self.managed_bytes / (self.managed_bytes + self.params_bytes)

    def saved(self, held_bytes: float, has_workspace: bool = True) -> float:
        """Return which share of the baseline's managed bytes is saved where `held_bytes` are held instead."""
        base = self.managed_bytes - (0 if has_workspace else self.workspace_bytes)
        return 1.0 - held_bytes / base


def study(network: Network, device: Device) -> Study:
    """Simulate a step of a network under each policy.

    Under vDNN convolutions run without workspace, as its memory-optimal algorithms do; the baseline's are the fastest.
    """
    return Study(
        network.map_bytes,
        network.gradient_bytes,
        workspace_bytes(network, device),
        PARAM_COPIES * network.param_bytes,
        {policy: play(network, policy, device) for policy in Policy},
    )
