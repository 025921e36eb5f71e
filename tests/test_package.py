"""The package as users install it: the contents and metadata of its archives, and a wheel that works without extras."""

import ast
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from helpers.demo import ROOT

import hf_infcl

# Imported only where the user has asked for the package by name: --report_to, and a model or format of OpenCLIP, whose
# package tests/open_clip.txt pins apart from the environment (ftfy is a part of its tokenizers).
BY_NAME = ("ftfy", "mlflow", "open_clip", "trackio", "wandb")
EXTRAS = ("matplotlib", "peft", "sentence_transformers", "simplejpeg", "sklearn", "triton")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the sdist, as on machines for which an index has no wheel; dist/ holds both."""

    def build(kind: str, source: Path) -> Path:
        code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(folder / 'dist')!r}))"
        printed = subprocess.check_output([sys.executable, "-c", code], cwd=source, stderr=subprocess.PIPE, text=True)
        return folder / "dist" / printed.split()[-1]

    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "hf_infcl", source / "hf_infcl", ignore=shutil.ignore_patterns("__pycache__"))
    sdist = build("sdist", source)
    shutil.unpack_archive(sdist, folder)
    return build("wheel", folder / sdist.name.removesuffix(".tar.gz"))


def test_the_archives_hold_the_package_and_nothing_else(wheel):
    files = [path for path in (ROOT / "hf_infcl").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    package = {str(path.relative_to(ROOT)) for path in files}
    assert "hf_infcl/py.typed" in package
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == package
    with tarfile.open(next(wheel.parent.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= package | {"pyproject.toml", "README.md", "LICENSE"}


def test_the_metadata_say_what_an_index_shows(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (folder,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
        commands = archive.read(f"{folder}/entry_points.txt").decode()
    assert metadata["Version"] == hf_infcl.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"]
    assert metadata.get_payload().startswith("# hf_infcl")
    assert {"demo", "embedders", "fast", "peft", "test"} == set(metadata.get_all("Provides-Extra"))
    assert len(metadata.get_all("Project-URL")) >= 2
    assert "Programming Language :: Python :: 3.10" in metadata.get_all("Classifier")
    needed = {re.match("[a-z_]+", line)[0] for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    assert needed >= {"torch", "transformers", "accelerate", "datasets", "huggingface_hub", "pyyaml"}
    assert not needed & set(EXTRAS)
    assert "infcl = hf_infcl.cli:main" in commands


def imported() -> dict[str, str]:
    """Every package that a file of the package imports, anywhere in it, with the first such file."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "hf_infcl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [str(node.module)]
            for name in names:
                found.setdefault(name.partition(".")[0], str(path.relative_to(ROOT)))
    return {name: path for name, path in found.items() if name not in {*sys.stdlib_module_names, "hf_infcl"}}


def test_every_package_that_is_imported_is_declared(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    declared = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in metadata.get_all("Requires-Dist")}
    distributions = {"PIL": "pillow", "yaml": "pyyaml"}
    undeclared = {n: path for n, path in imported().items() if distributions.get(n, n) not in declared | set(BY_NAME)}
    assert not undeclared
    assert set(BY_NAME) <= imported().keys()


def test_the_wheel_alone_runs_without_what_is_only_an_extra(wheel, tmp_path):
    """The loss and all names of `hf_infcl` do without the packages for data and metrics as well."""
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q", "--target", tmp_path / "site"]
    subprocess.run([*pip, wheel], check=True, capture_output=True)
    code = f"""
import importlib, pkgutil, sys
for name in {(*EXTRAS, "datasets", "evaluate")}:
    sys.modules[name] = None  # importing it raises ImportError
import torch, hf_infcl, hf_infcl.trainer.trainer, hf_infcl.card
assert hf_infcl.__file__.startswith({str(tmp_path)!r}), hf_infcl.__file__
for name in hf_infcl.__all__:
    getattr(hf_infcl, name)
x = torch.eye(4)
loss = hf_infcl.contrastive_loss(x, x, 1.0)
assert abs(loss.item() - torch.nn.functional.cross_entropy(x, torch.arange(4)).item()) < 1e-6, loss
del sys.modules["datasets"], sys.modules["evaluate"]
needs_triton = ("hf_infcl.kernels.triton_", "hf_infcl.kernels.hopper_", "hf_infcl.models.triton_")
for module in pkgutil.walk_packages(hf_infcl.__path__, "hf_infcl."):
    if not module.name.startswith(needs_triton) and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from hf_infcl.cli.commands import PARSERS
assert PARSERS["train"]().read(["--recipe", "finetune_keep"]).replay_share == 0.5
from hf_infcl.cli import main
main(words=["--version"])
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"hf_infcl {hf_infcl.__version__}" in done.stdout.splitlines()
    assert (tmp_path / "site/bin/infcl").exists()


def test_every_file_that_names_the_version_names_this_one():
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[(.+?)\]", changes, re.MULTILINE)[1] == hf_infcl.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == hf_infcl.__version__
    assert {reference["url"].rpartition("/")[2] for reference in citation["references"]} == {"2410.17243", "2304.08480"}


def test_continuous_integration_is_the_check_that_contributors_run():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    for job, command in (("check", "bash .ci/run"), ("demo", "bash scripts/demo.sh")):
        assert any(step.get("run") == command for step in workflow["jobs"][job]["steps"])
    bug = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    asked = {item["id"]: item["attributes"]["description"] for item in bug["body"]}
    assert "infcl --version" in asked["versions"]
