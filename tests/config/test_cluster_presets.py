"""cluster=auto: the preset of this machine, by the name of its host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gems.cli.framework import Verb, main
from gems.config import cluster_presets as presets
from gems.config.cluster_presets import AUTO, choose_preset, host_names, matching
from gems.config.compose import compose
from gems.config.overrides import CONF
from gems.errors import ConfigError
from jobs.__main__ import VERBS as JOBS

WORDS = ["data=synthetic", "parallel.partitions=4"]
ON_MINI = "# @package _global_\ndefaults:\n  - override /cluster: mini\n"


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Yield this machine other host names; what was chosen before is forgotten."""

    def become(*names: str) -> None:
        presets._choose.cache_clear()
        monkeypatch.setattr(presets, "host_names", lambda: names)

    yield become
    presets._choose.cache_clear()


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    folder = tmp_path / "sites"
    (folder / "cluster").mkdir(parents=True)
    (folder / "cluster" / "here.yaml").write_text(
        'name: here\nlauncher: srun\nhosts: ["Head*.here.org", "h[12]"]\n'
    )
    (folder / "cluster" / "there.yaml").write_text('name: there\nlauncher: srun\nhosts: ["h2"]\n')
    (folder / "cluster" / "nowhere.yaml").write_text("name: nowhere\n")
    return folder


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["head7.here.org"], {"here": "head7.here.org"}),
        (["h1", "h1.x"], {"here": "h1"}),
        (["h2"], {"here": "h2", "there": "h2"}),
        (["h3", "ahead.here.org"], {}),
    ],
)
def test_matching(sites: Path, names: list[str], found: dict[str, str]) -> None:
    assert matching([sites], names) == found


@pytest.mark.parametrize(
    ("host", "preset"),
    [
        ("login05.frontier.olcf.ornl.gov", "frontier"),
        ("login07.chn.perlmutter.nersc.gov", "perlmutter"),
        ("login02.leonardo.local", "leonardo"),
        ("jwlogin22.juwels", "juwels_booster"),
        ("jpbl-s01-02", "jupiter"),
        ("alogin1", "marenostrum5"),
        ("clariden-ln001", "alps"),
        ("dt-login03.delta.ncsa.illinois.edu", "delta"),
        ("login1.frontera.tacc.utexas.edu", "frontera"),
        ("login4.karolina.it4i.cz", "karolina"),
        ("int6.local.snellius.surf.nl", "snellius"),
    ],
)
def test_login_nodes_fit_one_preset_each(host: str, preset: str) -> None:
    assert matching([CONF], [host]) == {preset: host}


@pytest.mark.parametrize(
    "host", ["login1", "login1.example.org", "jwlogin05.juwels", "vm", "localhost"]
)
def test_other_machines_fit_none(host: str) -> None:
    assert matching([CONF], [host]) == {}


def test_it_is_said_once_and_taken(
    at: Callable[..., None], sites: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at("h1")
    words = [f"hydra.searchpath=['file://{sites}']", "cluster=auto", *WORDS]
    assert compose(words).cluster.name == "here"
    assert compose([*words, "seed=1"]).cluster.name == "here"
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "gems: cluster=here, by the host name h1; cluster=NAME overrides it"


@pytest.mark.parametrize("last", ["slurm", "mini"])
def test_a_preset_that_is_given_goes_before(
    at: Callable[..., None], last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    at("nobody")
    assert compose(["cluster=auto", f"cluster={last}", *WORDS]).cluster.name == last
    assert capsys.readouterr().err == ""


def test_auto_after_a_preset_counts(at: Callable[..., None]) -> None:
    at("nobody")
    with pytest.raises(
        ConfigError, match=r"^cluster=auto: no preset knows the host nobody; .*jobs discover"
    ):
        compose(["cluster=mini", "cluster=auto", *WORDS])


def test_several_presets_of_one_host(at: Callable[..., None], sites: Path) -> None:
    at("h2")
    with pytest.raises(
        ConfigError, match=r"^cluster=auto: the host h2 fits several presets: here, there; "
    ):
        choose_preset([sites])


def test_a_file_that_is_no_preset(at: Callable[..., None], sites: Path) -> None:
    at("h1")
    (sites / "cluster" / "broken.yaml").write_text("a: [1\nb: 2\n")
    with pytest.raises(ConfigError, match=r"broken\.yaml: cannot be read") as error:
        choose_preset([sites])
    assert len(str(error.value).splitlines()) == 1


def test_nothing_is_detected_unless_asked(at: Callable[..., None]) -> None:
    at("login05.frontier.olcf.ornl.gov")
    assert compose(WORDS).cluster.name == "local"


class TestAsDefault:
    """What `make submit` asks for.

    This machine's preset, unless the experiment or the user names one.
    """

    def test_it_is_taken_where_nothing_else_is_named(
        self, at: Callable[..., None], sites: Path
    ) -> None:
        at("h1")
        words = [f"hydra.searchpath=['file://{sites}']", *WORDS]
        assert compose(words, AUTO).cluster.name == "here"

    @pytest.mark.parametrize("host", ["h1", "nobody"])
    @pytest.mark.parametrize("word", ["cluster=mini", "experiment=on_mini"])
    def test_an_experiment_and_the_user_go_before(
        self,
        at: Callable[..., None],
        sites: Path,
        capsys: pytest.CaptureFixture[str],
        host: str,
        word: str,
    ) -> None:
        at(host)
        (sites / "experiment").mkdir()
        (sites / "experiment" / "on_mini.yaml").write_text(ON_MINI)
        words = [f"hydra.searchpath=['file://{sites}']", word, *WORDS]
        assert compose(words, AUTO).cluster.name == "mini"
        assert capsys.readouterr().err == ""

    def test_no_preset_of_this_machine(self, at: Callable[..., None]) -> None:
        at("nobody")
        with pytest.raises(ConfigError, match=r"^cluster=auto: no preset knows the host nobody; "):
            compose(WORDS, AUTO)

    def test_the_command(self, at: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
        at("nobody")
        assert main("jobs", JOBS, ["submit", "--dry-run", "--auto-cluster", *WORDS]) == 2
        assert capsys.readouterr().err.startswith(
            "jobs: cluster=auto: no preset knows the host nobody"
        )
        assert main("jobs", JOBS, ["submit", "--auto-cluster", *WORDS, "--cfg", "job"]) == 2
        words = ["submit", "--dry-run", "--auto-cluster", "cluster=mini", *WORDS]
        assert main("jobs", JOBS, words) == 0
        assert "#SBATCH" in capsys.readouterr().out


def test_auto_is_among_the_options() -> None:
    with pytest.raises(ConfigError, match=r"allowed: adastra, .*, auto; nearest: auto"):
        compose(["cluster=aut", *WORDS])


def test_hydras_own_options_know_it(
    at: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    at("clariden-ln002")
    verbs = {"show": Verb("json:dumps", "shows")}
    assert (
        main(
            "gems", verbs, ["show", "cluster=auto", *WORDS, "--cfg", "job", "--package", "cluster"]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert "name: alps" in out and "cluster=alps, by the host name clariden-ln002" in err


def test_the_names_of_this_machine() -> None:
    assert host_names() and all(name == name.lower() for name in host_names())
