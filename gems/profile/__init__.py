"""What each layer of a model costs.

The profile as plain data, and (in modules of their own) how it is taken.
"""

from gems.profile.model_profile import SCHEMA, LayerProfile, ModelProfile

__all__ = ["SCHEMA", "LayerProfile", "ModelProfile"]
