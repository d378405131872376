"""Published schedules, one file per family: pure functions to be read next to their papers."""

# The order in tables, simplest first. Families that are not named here come last.
ORDER = (
    "layer_parallel",
    "gpipe",
    "1f1b",
    "zb_h1",
    "zb_h2",
    "interleaved_1f1b",
    "looped_bfs",
    "group_interleaved",
    "zb_v",
    "v_half",
    "v_min",
    "v_adaptive",
    "dualpipe_v",
    "chimera",
    "gems_zb",
    "gems_mast",
    "gems_master",
    "capped",
)
