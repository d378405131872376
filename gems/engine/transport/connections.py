"""The connections of a rank to the others: messages, sums and control."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from gems.config.cluster import ORDERED_TRANSPORTS
from gems.engine.supervision.recorder import Recorder
from gems.engine.transport.links import Links, Sums
from gems.engine.transport.memory_format import ChannelsLast
from gems.engine.transport.mpi import Comm, Transport, ranks_here
from gems.engine.transport.nccl_gloo import open_groups
from gems.engine.transport.p2p_channels import Boundary, P2PChannels
from gems.engine.transport.polling import WaitState, spin_time_s
from gems.engine.transport.staging import Staging, open_staging
from gems.plan.rank_plan import RankPlan
from gems.schedule.edges import check_message_order
from gems.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Connections:
    """What connects a rank with others, and how tensors get there."""

    plan: RankPlan
    links: Sequence[Links]  # to the ranks of the pipeline: forward, backward
    sums: Sums  # over the copies of the rank's stages
    labels: Transport  # between the ranks that read labels, and between the others
    control: Transport  # between all ranks
    staging: Staging
    num_sharers: int  # ranks on this machine

    @classmethod
    def open(
        cls, plan: RankPlan, comm: Comm, device: torch.device, wait_state: WaitState | None
    ) -> Connections:
        """Open the connections of a rank; collective over `comm`, the communicator of all ranks.

        Raises:
            ConfigError: The transport cannot work here, or not with this schedule.
        """
        schedule = plan.schedule
        placement = schedule.placement
        transport = plan.spec.machine.transport
        replicas = plan.spec.parallel.replicas
        hang_timeout_s = plan.spec.train.hang_timeout_s
        replica, index = plan.position(comm.rank)
        num_sharers = ranks_here(comm)
        open_group = partial(
            Transport.of_group,
            comm,
            hang_timeout_s=hang_timeout_s,
            spin_s=spin_time_s(num_sharers, device.type == "cuda"),
            wait_state=wait_state,
        )
        if transport in ORDERED_TRANSPORTS:
            check_message_order(schedule, transport)
            groups = open_groups(
                transport, comm, device, placement, replicas, hang_timeout_s, wait_state
            )
            links: Sequence[Links] = groups.links
            sums: Sums = groups.gradients
        else:
            links = [open_group(replica) for _ in range(2)]
            sums = open_group(placement.reduce_group(index, replicas)[0])
        staging = open_staging(transport, device, comm)
        stages = {stage for _, stage in placement.stages_on(index)}
        labels = open_group(int(schedule.num_stages - 1 in stages))
        return cls(plan, links, sums, labels, open_group(0), staging, num_sharers)

    def open_channels(
        self, schedule: Schedule, outputs: Sequence[Boundary], recorder: Recorder
    ) -> P2PChannels:
        """Return the channels for a schedule whose stages have these outputs."""
        open_channels = ChannelsLast if self.plan.spec.machine.channels_last else P2PChannels
        _, index = self.plan.position(self.control.rank)
        return open_channels(schedule, index, outputs, self.links, self.staging, recorder)

    def close(self) -> None:
        """Free the communicators, of which MPI has a limited number.

        The call is collective. Nothing may be under way.
        """
        for links in self.links:
            links.close()
        self.sums.close()
        self.labels.close()
        self.control.close()
