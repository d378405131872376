"""A user's own network by its configuration.

What is derived, what is refused and at which line, and who is asked.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gems.config.compose import compose
from gems.config.resolve import resolve
from gems.config.schema import ModelConfig, RunSpec
from gems.errors import ConfigError
from gems.models import check_image, layers_of, title_of
from gems.models.imported.describe import resolve_target
from gems.utils.targets import source_of
from tests.helpers.owned import DATA, NETS, ROOT, UNET, own
from tests.helpers.processes import python


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "says", "line"),
        [
            (
                "ChoosesByValue",
                "a choice by the values of a tensor",
                "if x.mean() > 0:  # the choice",
            ),
            ("CountsPixels", "as a plain number", "for _ in range(x.shape[2]):  # the count"),
            ("MakesTensor", "a tensor that is no parameter", "torch.randn(2, 1, 1)"),
            ("Mismatched", "does not run on images of 3x9x10", "# the mismatch"),
            (
                "NoTensor",
                "must give a tensor of scores, and gives",
                "def forward(self, image: Tensor) -> dict",
            ),
            ("FailsToBeMade", "cannot be constructed", "# the failure"),
        ],
    )
    def test_names_the_line(self, name: str, says: str, line: str) -> None:
        with pytest.raises(ConfigError) as caught:
            layers_of(own(f"{NETS}.{name}"), DATA)
        text = str(caught.value)
        assert caught.value.key == "model.target" and says in text and "\n" not in text
        source = (ROOT / "tests/helpers/own_nets.py").read_text().splitlines()
        number = int(text.partition("own_nets.py:")[2].partition(" ")[0].rstrip(":"))
        assert (line or "def forward") in source[number - 1]

    @pytest.mark.parametrize(
        ("target", "says"),
        [
            ("no_such_package.Net", "no module named no_such_package"),
            ("tests.no_such_module.Net", "no module named tests.no_such_module"),
            (f"{NETS}.Wraped", "nothing named Wraped in tests.helpers.own_nets; nearest: Wrapped"),
            (f"{NETS}.HasNoParameters", "has no parameters"),
            (f"{NETS}.lazy", "leaves the shape of 1.weight to its first image"),
            (f"{NETS}.gives_a_number", "must give a torch.nn.Module, gives int"),
            (f"{NETS}.NOT_CALLABLE", "must name a class or a function"),
        ],
    )
    def test_what_is_no_network(self, target: str, says: str) -> None:
        with pytest.raises(ConfigError, match=r"model\.target=") as caught:
            layers_of(own(target), DATA)
        assert says in str(caught.value)

    def test_an_import_that_fails(self, tmp_path: Path) -> None:
        (tmp_path / "broken_net.py").write_text("x = 1\ny = x / 0\n")
        with pytest.raises(
            ConfigError, match=r"cannot be imported at .*broken_net.py:2 `y = x / 0`"
        ):
            layers_of(ModelConfig(target="broken_net.Net", path=str(tmp_path)), DATA)

    def test_keyword_arguments_that_it_does_not_take(self) -> None:
        with pytest.raises(
            ConfigError, match=r"model.kwargs=.*'widht'.*it takes \(width=8, depth=2"
        ):
            layers_of(own(UNET, widht=3), DATA)

    def test_another_number_of_classes(self) -> None:
        with pytest.raises(
            ConfigError, match=r"shape \(N, 5\), must give \(N, data.num_classes=2\)"
        ):
            layers_of(own(UNET, num_classes=5), DATA)

    def test_a_batch_that_leaves_batch_norm_one_value(self) -> None:
        check_image(own(f"{NETS}.Normed"), DATA, micro_batch_size=2)
        check_image(own(UNET), DATA, micro_batch_size=1)
        with pytest.raises(ConfigError, match="takes 2 images of 9x10 px or more") as caught:
            check_image(own(f"{NETS}.Normed"), DATA, micro_batch_size=1)
        assert caught.value.key == "parallel.micro_batch_size"

    @pytest.mark.parametrize("target", ["Net", "a b.Net", "a:b:C", "package.", "package:"])
    def test_a_target_that_is_no_dotted_name(self, target: str) -> None:
        with pytest.raises(ConfigError, match=r"package\.module\.Class"):
            own(target)

    def test_a_path_that_is_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"model\.path=.*is not a folder"):
            resolve_target(ModelConfig(target=UNET, path=str(tmp_path / "none")))

    def test_norms_that_it_does_not_have(self) -> None:
        with pytest.raises(
            ConfigError, match=r"model\.norm=layer: is for networks of the zoo; .*frozen_batch"
        ):
            resolve_target(ModelConfig(target=UNET, norm="layer"))
        with pytest.raises(
            ConfigError, match=r"model\.norm=frozen_batch: changes batch norms, and .* has none"
        ):
            layers_of(
                resolve_target(
                    ModelConfig(target=UNET, kwargs={"norm": "group"}, norm="frozen_batch")
                ),
                DATA,
            )

    @pytest.mark.parametrize("changes", [{"kwargs": {"width": 3}}, {"path": "."}])
    def test_arguments_for_a_network_of_the_toolkit(self, changes: dict[str, object]) -> None:
        with pytest.raises(ConfigError, match="is for a network of your own"):
            resolve(RunSpec(model=ModelConfig(**changes)))


class TestConfiguration:
    def test_a_target_alone_is_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Over the default model, whose keys mean nothing then."""
        monkeypatch.chdir(ROOT)
        words = [
            f"model.target={UNET}",
            "data.height_px=16",
            "data.width_px=16",
            "parallel.partitions=2",
        ]
        model = compose(
            [*words, "model.kwargs={width:4}", "model.kwargs.norm=group", "model=resnet110_v2"]
        ).model
        assert model == ModelConfig(
            name="OwnUNet", target=UNET, kwargs={"width": 4, "norm": "group"}, path=str(ROOT)
        )
        assert title_of(model) == "OwnUNet"
        assert resolve_target(model) == model

    def test_the_folder_is_the_one_that_holds_the_package(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "found_net.py").write_text("")
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        model = ModelConfig(target="found_net.Net")
        monkeypatch.chdir(elsewhere)
        assert resolve_target(model).path is None
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        assert resolve_target(model).path == str(tmp_path)
        monkeypatch.chdir(tmp_path)
        assert resolve_target(ModelConfig(target="found_net.Net", path="elsewhere")).path == str(
            elsewhere
        )

    def test_the_code_of_the_package_counts(self, tmp_path: Path) -> None:
        package = tmp_path / "counted"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "net.py").write_text("from counted.blocks import Block\n")
        (package / "blocks.py").write_text("Block = 1\n")
        found = set()
        for text in ("Block = 1\n", "Block = 2\n"):
            (package / "blocks.py").write_text(text)
            source_of.cache_clear()
            found.add(source_of("counted.net.Net", str(tmp_path)))
        assert len(found) == 2 and None not in found
        assert source_of("nowhere_to_be_found.Net", str(tmp_path)) is None

    def test_the_login_node_asks_a_child_once(self, tmp_path: Path, warm_executable: str) -> None:
        """No torch in this process; the answer is in the cache until the code changes."""
        code = "from torch import nn\nopen('imports', 'a').write('x')\nprint('noise')\n"
        code += "def net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(12, 2))\n"
        (tmp_path / "child_net.py").write_text(code)
        program = (
            "import sys; sys.executable = sys.argv[1]; "
            "from gems.config.schema import *; from gems.models import *; from"
            " gems.models.imported.describe import resolve_target as resolve; model ="
            " resolve(ModelConfig(target='child_net.net')); data = DataConfig(height_px=2,"
            " width_px=2); check_image(model, data, 1); print(*[layer.name for layer in"
            " layers_of(model, data)], 'torch' in sys.modules)"
        )
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "GEMS_CACHE_DIR": str(tmp_path / "cache"),
        }
        for expected in ("x", "x", "xx"):
            if expected == "xx":
                (tmp_path / "child_net.py").write_text(code + "# changed\n")
            done = python("-c", program, warm_executable, cwd=tmp_path, env=environment, check=True)
            assert done.stdout.split() == ["0", "1", "False"]
            assert (tmp_path / "imports").read_text() == expected
