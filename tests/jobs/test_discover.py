"""The draft of a preset, from what SLURM's commands say at sites of several kinds."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from gems.cli.framework import main
from gems.config.compose import compose
from gems.config.fields import check_fields
from gems.config.schema import RunSpec
from jobs.__main__ import VERBS
from jobs.cli import discover
from jobs.cli.discover import (
    Site,
    draft_limit,
    draft_preset,
    format_draft,
    host_pattern,
    main_kind,
    mpi_type,
)
from jobs.schedulers.slurm_client.site import (
    NodeKind,
    parse_config,
    parse_kinds,
    parse_minutes,
    parse_mpi_types,
    parse_partitions,
)
from tests.helpers.job_helpers import Capture, MonkeyPatch

SINFO = """\
cpu*|1000|128|256000|(null)
gpu|64|96|512000|gpu:a100:4(S:0-1),craynetwork:4
gpu|8|96+|512000+|gpu:a100:4(S:0-1),nvme:1
mig|2|64|256000|gpu:a100_3g.20gb:4(S:0),gpu:a100:2(S:1)
"""
PARTITIONS = """\
PartitionName=cpu AllowQos=ALL Default=YES MaxNodes=UNLIMITED MaxTime=2-00:00:00 MinNodes=0 State=UP TotalNodes=1000
PartitionName=gpu AllowQos=ALL Default=NO MaxNodes=32 MaxTime=12:00:00 MinNodes=2 State=UP TotalNodes=72
PartitionName=mig AllowQos=ALL Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=1 State=UP TotalNodes=2
"""
CONFIG = """\
Configuration data as of 2026-11-21T10:00:00
AccountingStorageEnforce = associations,limits,qos
ClusterName             = Big-Site
MpiDefault              = pmix
SelectType              = select/cons_tres
SLURM_VERSION           = 23.11.4
TopologyParam           =

Slurmctld(primary) at head is UP
"""
MPI_TYPES = (
    "MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\nspecific pmix plugin versions available:"
    " pmix_v4\n"
)
GPU = NodeKind("gpu", False, 64, 96, 512000 << 20, 4)


@pytest.fixture
def site() -> Site:
    return Site(
        ("login3", "login3.big.org"),
        parse_config(CONFIG),
        tuple(parse_kinds(SINFO)),
        tuple(parse_partitions(PARTITIONS)),
        parse_mpi_types(MPI_TYPES),
        "mpich",
    )


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """SLURM's commands as files that print what the site says.

    Nothing else is on PATH but the shell's own.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, said in (
        ("sinfo", SINFO),
        ("partition", PARTITIONS),
        ("config", CONFIG),
        ("srun", MPI_TYPES),
    ):
        (folder / f"{name}.txt").write_text(said)
    for name, line in (
        ("sinfo", f"cat {folder}/sinfo.txt"),
        ("scontrol", f'for last; do :; done; cat {folder}/"$last".txt'),
        ("srun", f"cat {folder}/srun.txt >&2"),
    ):
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(discover, "host_names", lambda: ("login3", "login3.big.org"))
    return folder


def test_the_draft_composes_as_a_preset(slurm: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main("jobs", VERBS, ["discover"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    folder = tmp_path / "conf" / "cluster"
    folder.mkdir(parents=True)
    (folder / "big_site.yaml").write_text(out)
    words = [
        f"hydra.searchpath=['file://{folder.parent}']",
        "cluster=big_site",
        "data=synthetic",
        "parallel.partitions=8",
    ]
    cluster = compose(words).cluster
    assert (cluster.name, cluster.launcher, cluster.hosts) == (
        "big_site",
        "srun",
        ["login*.big.org"],
    )
    assert (
        cluster.nodes,
        cluster.ranks_per_node,
        cluster.gpus_per_node,
        cluster.cpus_per_rank,
    ) == (2, 4, 4, 24)
    assert (cluster.usable_cpus_per_node, cluster.node_memory_bytes) == (96, 512000 << 20)
    assert (cluster.partition, cluster.mpi, cluster.gpu_request) == ("gpu", "pmix", "gpus-per-node")
    rows = [(row.partition, row.min_nodes, row.max_nodes, row.minutes) for row in cluster.limits]
    assert rows == [("cpu", 1, 1000, 2880), ("gpu", 2, 32, 720), ("mig", 1, 2, None)]
    assert "needed here, your project" in out and "login3" in out and "23.11.4" in out


def test_as_json_it_is_the_same_preset(slurm: Path, capsys: Capture) -> None:
    main("jobs", VERBS, ["discover"])
    text = capsys.readouterr().out
    assert main("jobs", VERBS, ["discover", "--json"]) == 0
    preset = json.loads(capsys.readouterr().out)
    assert yaml.safe_load(text) == preset
    check_fields(RunSpec.from_dict({"cluster": preset}).cluster)


def test_where_there_is_no_slurm(tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main("jobs", VERBS, ["discover"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert err.startswith("jobs: sinfo=none: is not on PATH: there is no SLURM here")


@pytest.mark.parametrize(
    ("name", "line", "says"),
    [
        (
            "scontrol",
            "echo 'slurm_load_ctl_conf error: Unable to contact slurm controller' >&2; exit 1",
            (
                "scontrol=show config: does not answer: slurm_load_ctl_conf error: Unable to"
                " contact slurm controller; "
            ),
        ),
        ("sinfo", "exit 0", "sinfo=none: lists no partition that you may use"),
    ],
)
def test_a_slurm_that_does_not_answer(
    slurm: Path, name: str, line: str, says: str, capsys: Capture
) -> None:
    (slurm / name).write_text(f"#!/bin/sh\n{line}\n")
    assert main("jobs", VERBS, ["discover"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"jobs: {says}")


def test_words_are_refused(capsys: Capture) -> None:
    assert main("jobs", VERBS, ["discover", "cluster=mini"]) == 2
    assert "takes no words" in capsys.readouterr().err


def test_nodes_that_are_drafted_for(site: Site) -> None:
    cpu, gpu, _, mig = site.kinds
    assert gpu == GPU and (cpu.gpus, cpu.is_default, mig.gpus) == (0, True, 6)
    assert main_kind(site.kinds) == gpu, "GPUs before the default partition"
    assert main_kind([cpu]) == cpu
    assert main_kind([cpu, gpu, replace(mig, is_default=True)]).partition == "mig"


def test_the_others_are_named_beside(site: Site) -> None:
    (line,) = (line for line in format_draft(site).splitlines() if line.startswith("partition:"))
    assert "cpu (1000 x 128 CPUs, 0 GPUs)" in line and "mig (2 x 64 CPUs, 6 GPUs)" in line


def test_without_gpus(site: Site) -> None:
    preset = draft_preset(replace(site, kinds=site.kinds[:1]))
    assert (preset["gpus_per_node"], preset["gpu_request"], preset["cpus_per_rank"]) == (
        0,
        "none",
        1,
    )


@pytest.mark.parametrize(
    ("default", "family", "word"),
    [
        ("pmix", "mpich", "pmix"),
        ("none", "mpich", "pmi2"),
        ("none", "openmpi", "pmix"),
        ("none", None, None),
    ],
)
def test_srun_word_for_mpi(site: Site, default: str, family: str | None, word: str | None) -> None:
    assert mpi_type(replace(site, config={"MpiDefault": default}, mpi_family=family)) == word


def test_a_plug_in_that_is_not_listed_is_not_drafted(site: Site) -> None:
    assert mpi_type(replace(site, config={}, mpi_types=("none",))) is None


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("1-00:00:00", 1440),
        ("2-12", 3600),
        ("12:30:00", 750),
        ("30:00", 30),
        ("45", 45),
        ("00:00:30", 1),
        ("UNLIMITED", None),
        ("infinite", None),
        ("", None),
        ("soon", None),
    ],
)
def test_durations(text: str, minutes: int | None) -> None:
    assert parse_minutes(text) == minutes


def test_listed_types_of_mpi() -> None:
    assert parse_mpi_types(MPI_TYPES) == ("pmix", "none", "pmi2")
    assert parse_mpi_types("srun: MPI types are...\nsrun: none\nsrun: pmi2\n") == ("none", "pmi2")


@pytest.mark.parametrize(
    ("hosts", "pattern"),
    [
        (("login12", "login12.a.org"), "login*.a.org"),
        (("head",), "head"),
        (("n1-login02",), "n*-login*"),
    ],
)
def test_patterns_of_hosts(hosts: tuple[str, ...], pattern: str) -> None:
    assert host_pattern(hosts) == pattern


def test_a_partition_that_is_empty_has_no_row_that_cannot_be() -> None:
    row = draft_limit(
        {
            "PartitionName": "old",
            "TotalNodes": "0",
            "MaxNodes": "1",
            "MinNodes": "2",
            "MaxTime": "60",
        }
    )
    assert row is not None
    check_fields(RunSpec.from_dict({"cluster": {"limits": [row]}}).cluster)
    assert draft_limit({"State": "UP"}) is None
