"""What stays on the device: the memory of every rank under a schedule, a cut and a plan (no torch here)."""

POLICIES = ("keep", "vdnn_all", "vdnn_conv", "vdnn_dyn", "lms", "lms_limit", "recompute", "plan")
RECOMPUTES = ("stage", "segment", "selective")
RECLAIMS = ("first", "size")
