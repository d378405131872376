"""Wrong configurations, drawn at random.

Overrides of every key of the schema, broken forms, groups and folders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_origin

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from gems.config.fields import Key, keys
from gems.config.overrides import FREE, options_of, valid_keys
from gems.config.schema import RunSpec

# Keys whose values are the user's own words: any text is right.
FREE_TEXT = {
    "name",
    "runs_dir",
    "cache_dir",
    "cluster.name",
    "machine.name",
    "machine.calibrated_from",
    "machine.launches_from",
    "cluster.account",
    "cluster.account_suffix",
    "cluster.partition",
    "cluster.mpi",
    "cluster.python",
    "cluster.charge_unit",
    "cluster.container_image",
    "data.path",
    "model.path",
    "profile.path",
    "schedule.path",
    "train.initial_checkpoint",
    "model.target",
    "plugins_dir",
    # read only beside another key: a target, a network with several outputs, validation, a file of
    # weights, several strips
    "loss.path",
    "loss.output",
    "optimizer.path",
    "lr_scheduler.path",
    "train.monitor",
    "train.initial_prefix",
    "parallel.strips_until",
}
NO_WORD = st.from_regex(r"zq[a-z]{1,8}", fullmatch=True)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=24)
NO_NUMBER = st.one_of(
    NO_WORD, st.sampled_from(["''", "1x", "0x", "1..2", "1e", "--1", "null", "one", "1_", "٣x"])
)
HUGE = ["10000000000000000000000000000000000000000", str(2**63), str(2**200), "1" * 400]
NO_INT = st.one_of(
    NO_NUMBER,
    st.sampled_from(
        [
            "1.5",
            "nan",
            "inf",
            "-inf",
            "1e30",
            "-1",
            "-99999999999999999999",
            "[1]",
            "{a: 1}",
            "[]",
            "{}",
            *HUGE,
        ]
    ),
    st.integers(max_value=-1).map(str),
)
NO_FLOAT = st.one_of(
    NO_NUMBER,
    st.sampled_from(
        [
            "nan",
            "inf",
            "-inf",
            "-1",
            "-1e-9",
            "1e999",
            "-1e30",
            "[1.0]",
            "{a: 1.0}",
            "[]",
            *HUGE[-1:],
        ]
    ),
    st.floats(max_value=-1e-300, allow_infinity=False).map(repr),
)
NO_BOOL = st.one_of(
    NO_WORD, st.sampled_from(["1.5", "2x", "[true]", "{a: true}", "null", "''", "truth"])
)
NO_TEXT = st.sampled_from(["[a]", "{a: b}", "[]", "{}", "[[a]]"])
NO_MAPPING = st.sampled_from(["5", "1.5", "zq", "[a]", "true", "''", "null"])
NO_LIST = st.sampled_from(["5", "1.5", "zq", "{a: 1}", "true", "''", "null"])
HALVES = [
    "[1",
    "{a",
    "'a",
    "(",
    "a b)",
    "${",
    "???x]",
    "'",
    '"',
    "a,[",
    "{a:",
    "}",
    "\\'",
    "]",
    "${a",
    "${oc.env:X",
    "[1,,",
    "$(",
]
UNKNOWN = [
    "${oops}",
    "${oc.env:NO_SUCH_VARIABLE_HERE}",
    "${oops.oops}",
    "${.oops}",
    "${oc.decode:1}x${oops}",
    "${no_such:1}",
    "${oc.select:}",
    "${oc.env:}",
]


@dataclass(frozen=True, slots=True)
class Mistake:
    """Words of a command line.

    `named` must stand in the line that refuses them; `is_wrong`: nobody may accept them.
    """

    words: tuple[str, ...]
    named: str = ""
    is_wrong: bool = True


KEYS = list(keys(RunSpec))
KNOWN = sorted(valid_keys())
GROUPS = [key for key in KNOWN if options_of(key) and key not in ("study", "experiment")]
SLOW = (
    "partition.budget_s",
    "memory.budget_s",
    "schedule.budget_s",
)  # a search may take as long as it is told
LEFT = ("cache_dir",)  # what it names is kept after a refusal too
COUNTED = [key for key in KEYS if key.kind in (int, float)]


def wrong_value_of(key: Key) -> SearchStrategy[str]:
    """Return values that no run can have."""
    kinds: dict[Any, SearchStrategy[str]] = {
        int: NO_INT,
        float: NO_FLOAT,
        bool: NO_BOOL,
        str: NO_TEXT,
    }
    values = kinds.get(key.kind, NO_MAPPING if get_origin(key.kind) is dict else NO_LIST)
    if key.kind is str and key.name not in FREE_TEXT:
        values = values | st.one_of(NO_WORD, st.just("''"))
    if key.is_optional:
        values = values.filter(lambda value: value != "null")
    elif key.kind is str:
        values = values | st.just("null")
    return values


def _one(key: Key) -> SearchStrategy[Mistake]:
    return st.tuples(wrong_value_of(key), st.sampled_from(["", "+", "++"])).map(
        lambda drawn: Mistake((f"{key.name}={drawn[0]}",), key.name)
    )


def _nearly(name: str) -> SearchStrategy[str]:
    """Return words that are nearly `name`: a letter twice, left out, or two that changed places."""
    places = st.integers(0, len(name) - 1)
    return st.one_of(
        places.map(lambda n: name[:n] + name[n] + name[n:]),
        places.map(lambda n: name[:n] + name[n + 1 :]),
        places.map(lambda n: name[:n] + name[n + 1 : n + 2] + name[n] + name[n + 2 :]),
        st.just(f"{name}s"),
        st.just(name.upper()),
        st.just(f"{name}.x"),
        st.just(f"x.{name}"),
    )


WRONG_VALUES = st.sampled_from(KEYS).flatmap(_one)
UNKNOWN_KEYS = (
    st.sampled_from([key.name for key in KEYS])
    .flatmap(_nearly)
    .filter(lambda name: name and name not in KNOWN and "=" not in name)
    # a name below kwargs is one for the class, which is not loaded before the run
    .map(lambda name: Mistake((f"{name}=1",), is_wrong=not FREE.match(name)))
)
UNKNOWN_OPTIONS = st.sampled_from([*GROUPS, "experiment"]).flatmap(
    lambda group: (
        st.sampled_from(options_of(group))
        .flatmap(_nearly)
        .filter(lambda name: name and name not in options_of(group))
        .map(lambda name: Mistake((f"{group}={name}",), group))
    )
)
FORMS = st.one_of(
    st.tuples(st.sampled_from([key.name for key in KEYS]), st.sampled_from(HALVES)).map(
        lambda two: Mistake(("=".join(two),))
    ),
    st.tuples(st.sampled_from([key.name for key in KEYS]), st.sampled_from(UNKNOWN)).map(
        lambda two: Mistake(("=".join(two),), two[0])
    ),
    st.sampled_from([key.name for key in KEYS]).map(
        lambda name: Mistake((f"{name}=${{{name}}}",), name)
    ),
    st.sampled_from(KNOWN).map(lambda name: Mistake((f"~{name}",), name)),
    st.sampled_from(KNOWN).map(lambda name: Mistake((name,))),
    st.sampled_from(
        [
            "=",
            "==",
            "=1",
            "+",
            "~",
            "++",
            "+=",
            "~=1",
            "++=1",
            "a=b=c=",
            ",",
            "[",
            "",
            " ",
            "@",
            "a@b=c",
            "+a@=",
            "a@:b=c",
            "model@=resnet20_v1",
            "model@x=resnet20_v1",
            "model@_global_=resnet20_v1",
            "hydra=x",
            "hydra.job.chdir=x",
            "hydra.run=x",
            "hydra/launcher=x",
            "hydra.searchpath=x",
            "hydra.searchpath=[x]",
            "hydra.searchpath=[file://x]",
            "hydra.searchpath=[pkg://no.such]",
            "hydra.searchpath=[1]",
            "hydra.searchpath={}",
            "--config-dir",
            "--config-dir=",
            "--config-dir=/no/such",
            "--config-name=x",
            "--config-path=x",
            "-cn",
            "-cp",
            "--cfg=x",
            "--package",
            "--cfg",
            "--info=x",
            "--dry-rum",
            "-",
            "--",
            "---",
            "--=",
            "model=null",
            "schedule=[]",
            "parallel=x",
            "model=resnet20_v1,resnet18",
            "seed=1,2",
            "seed=range(1,3)",
            "seed=choice(1,2)",
            "name=glob(*)",
            "seed=sort(1,2)",
            "seed=shuffle(1,2)",
            "seed=int(x)",
            "seed=float(1)",
            "seed=nope(1)",
            "name=???",
            "model=???",
            "experiment=???",
            "experiment=[]",
            "experiment=[quickstart,nope]",
            "cluster=auto,auto",
            "study=emulated_scaling",
            "run_schema=x",
            "defaults=[]",
            "_self_=1",
            "_target_=os.system",
            "name._target_=x",
            "model._target_=x",
            "seed=1 seed=2",
            "seed =1x",
            "\tseed=x",
        ]
    ).map(lambda word: Mistake((word,))),
    TEXT.filter(
        lambda word: (
            "=" not in word and not word.startswith("--") and word not in ("-h", "-m", "-r")
        )
    ).map(lambda word: Mistake((word,))),
    st.tuples(
        st.sampled_from(["name", "cluster.account", "cluster.partition", "cluster.mpi"]),
        st.sampled_from(["a\nb", "a\x00b", "a\x1bb", "a\rb", "a\u2028b", "a\x7f", "\u202ea"]),
    ).map(lambda two: Mistake((f"{two[0]}='{two[1]}'",))),
    st.sampled_from(
        [
            "name='a/b'",
            "name=..",
            "name=.",
            "name=''",
            f"name={'a' * 300}",
            f"name={'é' * 200}",
            "name=null",
            "runs_dir=''",
            f"runs_dir={'x' * 5000}",
            f"runs_dir={'/x' * 3000}",
            "runs_dir=null",
            "name='$(touch owned)/x'",
        ]
    ).map(lambda word: Mistake((word,))),
)
# Values that may be right where they stand, or be too many, too few or in each other's way.
NUMBERS = st.sampled_from(
    [
        "0",
        "1",
        "2",
        "3",
        "4",
        "5",
        "7",
        "8",
        "16",
        "33",
        "1000000",
        "1000000000",
        "9223372036854775807",
    ]
)
SHARES = st.sampled_from(
    ["0", "1e-300", "1e-9", "0.1", "0.5", "0.999", "1", "1.0001", "2", "10", "1e9", "1e30", "1e300"]
)


def _perhaps(key: Key) -> SearchStrategy[str]:
    if key.kind in (int, float):
        values = NUMBERS if key.kind is int else SHARES | NUMBERS
        return (values | st.just("null") if key.is_optional else values).map(
            f"{key.name}={{}}".format
        )
    if key.kind is bool:
        return st.sampled_from(["true", "false"]).map(f"{key.name}={{}}".format)
    if key.kind is str:
        words = st.sampled_from(
            [
                "auto",
                "null",
                "file",
                "fake",
                "none",
                "''",
                "size",
                "time",
                "x",
                "conv",
                "bfloat16",
                "batch",
            ]
        )
        return words.map(f"{key.name}={{}}".format)
    lists = [
        "[]",
        "[0]",
        "[1,2]",
        "[0,1,2,3]",
        "[0,11,22]",
        "[0,22]",
        "[R]",
        "[R,OFFLOAD]",
        "[v]",
        "[1e300]",
        "[x]",
        "[null]",
        "[true]",
        "{}",
    ]
    return st.sampled_from(lists).map(f"{key.name}={{}}".format)


PERHAPS_ONE = st.one_of(
    st.sampled_from([key for key in KEYS if key.name not in (*SLOW, *LEFT)]).flatmap(_perhaps),
    st.sampled_from(
        [
            key
            for key in KEYS
            if key.name.startswith(("parallel", "schedule", "data", "machine", "memory", "cost"))
            and key.name not in SLOW
        ]
    ).flatmap(_perhaps),
    st.sampled_from(GROUPS).flatmap(
        lambda group: st.sampled_from(options_of(group)).map(f"{group}={{}}".format)
    ),
    st.sampled_from(options_of("experiment")).map("experiment={}".format),
)
PERHAPS_ONE |= st.sampled_from(
    [
        "runs_dir=/dev/null/x",
        "runs_dir=/proc/none",
        "data={}",
        "model={name: resnet}",
        "model=[resnet20_v1,resnet18]",
    ]
)
PERHAPS = st.lists(PERHAPS_ONE, min_size=1, max_size=6).map(
    lambda words: Mistake(tuple(words), is_wrong=False)
)
CONTRARY = st.sampled_from(
    [
        "parallel.partitions=9 parallel.boundaries=[0,5,11]",
        "parallel.boundaries=[0,0,11]",
        "parallel.boundaries=[]",
        "parallel.boundaries=[0]",
        "parallel.boundaries=[-1,3,11]",
        "parallel.boundaries=[0,3,99]",
        "parallel.boundaries=[5,3,11]",
        "parallel.partitions=2 parallel.boundaries=[0,11]",
        "parallel.partitions=1000",
        "parallel.partitions=13 schedule=1f1b",
        "parallel.micro_batches=7 schedule=gems_master",
        "parallel.micro_batches=6 parallel.replications=4 parallel.parts=2",
        "schedule=gems_mast parallel.replications=4",
        "data.height_px=1",
        "data.width_px=2 data.height_px=2",
        "schedule=capped",
        "schedule=capped schedule.activation_cap=1e-6 machine=simulated",
        "schedule.activation_cap=1e-9 machine=simulated",
        "schedule.activation_cap=1 schedule.activation_cap_bytes=5",
        "schedule.activation_cap_bytes=5",
        "schedule=file",
        "schedule=file schedule.path=/no/such",
        "memory=plan",
        "memory=lms",
        "memory=vdnn_dyn",
        "memory=lms_limit",
        "memory=vdnn_all machine=simulated",
        "memory=recompute schedule.memory_actions=[R]",
        "memory.target_reduction=1.5",
        "memory.sync_mode=9",
        "machine.device_bytes=1",
        "machine.device_bytes=1 parallel.partitions=2",
        "memory=plan memory.target_reduction=0.99 machine.device_bytes=1",
        "memory=plan memory.limit_bytes=1",
        "machine.host_bytes=1 memory=vdnn_all",
        "data=folder",
        "data=folder data.path=/no/such",
        "model.target=no_such_pkg.Net",
        "model.target=os.path",
        "model.target=math.pi",
        "model.kwargs.a=1",
        "model.path=/tmp",
        "cluster=mini cluster.nodes=3 parallel.partitions=2",
        "cluster=mini parallel.partitions=2 cluster.ranks_per_node=5",
        "cluster.nodes=2 parallel.partitions=2",
        "cluster=frontier cluster.minutes=100000 cluster.account=x",
        'cluster.launcher=srun cluster.python="\'"',
        "cluster.limits=[{a: 1}]",
        "cluster.limits=[1]",
        "cluster.limits=[{minutes: x}]",
        "cluster.device_order=[0,0]",
        "cluster.gpus_per_node=4 parallel.partitions=8 cluster.ranks_per_node=8",
        "+cluster.sbatch.nodes=2 cluster=slurm",
        "cluster=slurm +cluster.sbatch.a.b=2",
        "cluster=slurm cluster.environment={'a b': c}",
        "cluster.environment={a: [1]}",
        "cluster=slurm +cluster.environment.PATH=[1]",
        "cluster.container_image=x",
        "cluster.container=pyxis cluster.container_image=x",
        "model.depth=21",
        "model.version=3",
        "model.block=zq",
        "model.dropout=1",
        "model.dropout=2",
        "model.auxiliary=true",
        "profile.path=/no/such parallel.partitions=2",
        "profile.path=/ parallel.partitions=2",
        "train.initial_checkpoint=/no/such",
        "train.initial_checkpoint=/",
        "data.train_samples=1 parallel.micro_batch_size=8",
        "data.field_of_view_px=100000000",
        "profile=incremental parallel.partitions=2 profile.on=zq",
        "cost.times=[] machine=simulated",
        "cost.times=[0] machine=simulated",
        "cost.times=[nan]",
        "cost.activations=[-1]",
        "cost.times=[[1]]",
        "cluster.modules=['a b']",
        "cluster.hosts=['a b']",
        "cluster.srun=[[a]]",
        "cluster.setup=[[a]]",
        "cluster.setup=[null]",
        "schedule.memory_actions=[zq]",
        "schedule.placements=[zq]",
        "schedule.memory_actions=[null]",
        "schedule.max_stages=1 parallel.partitions=4",
        "machine.device=cuda machine.kind=zq",
        "cluster=perlmutter cluster.gpus_per_node=99",
        "machine.device=cuda:0",
    ]
).map(
    lambda text: Mistake(
        tuple(text.split(" "))
        if "'" not in text
        else tuple(
            text.replace("a b", "a\x01b")
            .replace(" ", "\x02")
            .replace("\x01", " ")
            .replace("\x02", "\n")
            .split("\n")
        )
    )
)
