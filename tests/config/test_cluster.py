"""gems.config.cluster: a preset as data, and every value that neither SLURM nor we could take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gems.config.cluster import ClusterConfig, QueueLimit, num_bound
from gems.config.compose import compose
from gems.config.constraints import check_cluster
from gems.config.fields import check_fields
from gems.config.overrides import CONF, options_of
from gems.config.schema import RunSpec
from gems.errors import ConfigError

GPUS = ClusterConfig(launcher="srun", gpus_per_node=4)


def check(cluster: ClusterConfig) -> None:
    check_fields(cluster, "cluster.")
    check_cluster(cluster)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"launcher": "mpirun"},
            (
                r"^cluster\.launcher=mpirun: allowed: mpiexec, srun, ibrun, flux, hydra, pals; .*;"
                r" did you mean "
            ),
        ),
        ({"scheduler": "lsf"}, r"^cluster\.scheduler=lsf: allowed: slurm, flux, pbs; "),
        (
            {"notify": ["mail:me"]},
            r"^cluster\.notify\[0\]='mail:me': must be mail, mail:ADDRESS, http",
        ),
        ({"notify": ["command:"]}, r"^cluster\.notify\[0\]='command:': must be mail, "),
        ({"gpu_bind": "close"}, r"^cluster\.gpu_bind='close': allowed: none, closest, "),
        ({"gpu_bind": "single"}, r"^cluster\.gpu_bind='single': "),
        ({"cpu_bind": "core"}, r"^cluster\.cpu_bind='core': allowed: none, cores, "),
        ({"cpu_bind": "map_cpu:1,,2"}, r"^cluster\.cpu_bind='map_cpu:1,,2': "),
        ({"cpu_bind": "cores $(touch owned)"}, r"^cluster\.cpu_bind="),
        (
            {"modules": ["gcc", "a; touch owned"]},
            r"^cluster\.modules\[1\]='a; touch owned': must be names of modules",
        ),
        ({"modules": ["--force"]}, r"^cluster\.modules\[0\]='--force': "),
        ({"hosts": ["a b"]}, r"^cluster\.hosts\[0\]='a b': must be patterns of host names"),
        (
            {"account": "a\ntouch owned"},
            r"^cluster\.account='a\\ntouch owned': must be printable text on one line, or null",
        ),
        ({"partition": ""}, r"^cluster\.partition='': must be printable text"),
        ({"mpi": "pmi2\r"}, r"^cluster\.mpi="),
        (
            {"device_order": [3, 2, 1, 1]},
            r"^cluster\.device_order=\[3, 2, 1, 1\]: must hold each of 0 to 3 once",
        ),
        (
            {"device_order": [1, 0]},
            r"^cluster\.device_order=\[1, 0\]: must list the 4 GPUs of a node",
        ),
        (
            {"container_image": "a.sif"},
            r"^cluster\.container_image=a\.sif: needs a container runtime; set cluster\.container",
        ),
        (
            {"container": "pyxis", "container_image": "a", "launcher": "ibrun"},
            r"^cluster\.container=pyxis: is a plug-in of srun",
        ),
        (
            {"charge_rate": 2.0},
            r"^cluster\.charge_per=null: must be given beside cluster\.charge_rate=2",
        ),
        (
            {"limits": [QueueLimit(), QueueLimit(minutes=0)]},
            r"^cluster\.limits\[1\]\.minutes=0: must be 1 or more",
        ),
        (
            {"limits": [QueueLimit(min_nodes=5, max_nodes=4)]},
            r"^cluster\.limits\[0\]\.max_nodes=4: must be 5 or more",
        ),
    ],
)
def test_one_line(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        check(replace(GPUS, **values))


@pytest.mark.parametrize(
    "values",
    [
        {"cpu_bind": "verbose,mask_cpu:7e,0xFE00"},
        {"cpu_bind": "map_ldom:3,1"},
        {"gpu_bind": "map_gpu:3,2*2,1"},
        {"gpu_bind": None},
        {"modules": ["LUMI/25.03", "openmpi/4.1.5+cuda", "gcc@13", "a/b--c"]},
        {"hosts": ["login[0-9]*.a-b.org"]},
        {"device_order": [3, 2, 1, 0]},
        {"container": "apptainer", "container_options": ["--nv"]},
        {"charge_per": "node-hour", "charge_unit": "SU"},
    ],
)
def test_what_sites_have_is_taken(values: dict[str, Any]) -> None:
    check(replace(GPUS, **values))


def test_num_bound() -> None:
    assert num_bound("map_cpu:49,57,17") == 3
    assert num_bound("quiet,mask_cpu:7e,7e00") == 2
    assert [num_bound(word) for word in (None, "cores", "none")] == [None, None, None]


@pytest.mark.parametrize(
    ("account", "full"),
    [("m1", "m1_g"), ("m1_g", "m1_g"), (None, None)],
    ids=["added", "there", "none"],
)
def test_the_sites_suffix_of_accounts(account: str | None, full: str | None) -> None:
    assert replace(GPUS, account=account, account_suffix="_g").full_account == full
    assert replace(GPUS, account=account).full_account == account


def test_limits_go_through_a_run_yaml() -> None:
    spec = RunSpec(cluster=replace(GPUS, limits=[QueueLimit("normal", None, 3, 512, 60, 2)]))
    assert RunSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"minuts": 3}, r"^cluster\.limits\[0\]\.minuts=3: allowed: .*minutes"),
        (7, r"^cluster\.limits\[0\]=7: must be a mapping"),
    ],
)
def test_a_limit_of_another_form(row: Any, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        RunSpec.from_dict({"cluster": {"limits": [row]}})


def test_limits_on_the_command_line() -> None:
    words = ["data=synthetic", "cluster=slurm", "parallel.partitions=4"]
    limits = compose([*words, "cluster.limits=[{partition: a, minutes: 5}]"]).cluster.limits
    assert limits == [QueueLimit("a", minutes=5)]
    with pytest.raises(ConfigError, match="minuts"):
        compose([*words, "cluster.limits=[{minuts: 5}]"])


@pytest.mark.parametrize("name", options_of("cluster"))
def test_a_preset_names_its_sources_and_that_limits_change(name: str) -> None:
    if name in ("local", "mini", "slurm", "flux", "pbs"):
        return
    said = "".join(
        line
        for line in (CONF / "cluster" / f"{name}.yaml").read_text().splitlines()
        if line[:1] == "#"
    )
    assert "From " in said and "20" in said.partition("From ")[2], "source and date"
    assert "Limits change" in said


def test_ranks_fill_the_cpus_of_a_node_without_gpus() -> None:
    words = [
        "data=synthetic",
        "cluster=slurm",
        "cluster.gpus_per_node=0",
        "cluster.usable_cpus_per_node=56",
    ]
    spec = compose(
        [*words, "cluster.cpus_per_rank=14", "parallel.partitions=2", "parallel.replicas=4"]
    )
    assert (spec.cluster.nodes, spec.cluster.ranks_per_node) == (2, 4)
