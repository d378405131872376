"""Where to cut a model into stages: an exact method, and the published ones by their names (no torch here)."""

METHODS = ("exact", "even", "mcap", "torchgpipe_size", "torchgpipe_time", "pipedream")
OBJECTIVES = ("auto", "peak_bytes", "time")
