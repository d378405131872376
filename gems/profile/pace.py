"""A machine's pace: how much longer layers take in a run than alone, as fitted by calibration."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from gems.profile.model_profile import TIMES, LayerProfile, ModelProfile

FACT = "pace"  # fact of a profile whose times include a pace


@dataclass(frozen=True, slots=True)
class RunPace:
    """How much longer a pass of a layer takes in a run than alone.

    A pass takes `factor` times as long, plus `pass_s` seconds of the host. Forward, input gradient,
    weight gradient and recompute are a pass each.
    """

    factor: float = 1.0
    pass_s: float = 0.0

    def time_s(self, alone_s: float, passes: float = 1.0) -> float:
        """Return the time in a run of passes that take `alone_s` alone."""
        return self.factor * alone_s + self.pass_s * passes

    def of(self, profile: ModelProfile) -> ModelProfile:
        """Return a profile of layers alone with the times of a run.

        A profile that already has a pace is returned unchanged.
        """
        if FACT in profile.facts:
            return profile
        layers = tuple(map(self._layer, profile.layers))
        return replace(profile, layers=layers, facts={**profile.facts, FACT: asdict(self)})

    def _layer(self, layer: LayerProfile) -> LayerProfile:
        times: dict[str, float] = {
            name: self.time_s(getattr(layer, name), passes=float(name != "split_s"))
            for name in TIMES
        }
        return replace(layer, **times)  # type: ignore[arg-type]
