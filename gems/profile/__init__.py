"""Profiles: the time and memory of each layer of a model, and the profilers that take them."""

from gems.profile.model_profile import SCHEMA, LayerProfile, ModelProfile

__all__ = ["SCHEMA", "LayerProfile", "ModelProfile"]
