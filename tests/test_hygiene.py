"""Files from elsewhere cannot run code or write outside their folder, and an audit that could not look says so."""

import ast
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import models
from helpers.demo import SCRIPTS
from helpers.trainers import StopAt, trainer_for

from hf_infcl.trainer import checkpoints

ROOT = SCRIPTS.parent


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("folder", ["hf_infcl", "scripts"])
def test_nothing_is_unpickled_and_no_archive_is_unpacked_as_it_likes(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        for name, call in calls(path):
            options = {option.arg: ast.unparse(option.value) for option in call.keywords}
            place = f"{path}:{call.lineno}"
            assert name not in ("eval", "exec", "os.system"), place
            assert not name.startswith(("pickle.", "marshal.", "shelve.", "dill.", "cloudpickle.")), place
            assert "trust_remote_code" not in options, place
            assert options.get("shell") != "True", place
            if name == "torch.load":
                assert options.get("weights_only") == "True", place
            if name in ("np.load", "numpy.load"):
                assert options.get("allow_pickle", "False") == "False", place
            if name == "yaml.load":
                assert options["Loader"] in ("_Loader", "yaml.BaseLoader"), f"{place}: safe loaders only"
            if name.endswith(".extractall"):
                assert options.get("filter") == "'data'", place


class Malicious:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.folder,)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"])
def test_a_checkpoint_runs_no_code(tmp_path, name, monkeypatch):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    trainer_for(tmp_path, **options, callbacks=[StopAt(1)]).train()
    checkpoint = tmp_path / "checkpoint-1"
    torch.save(Malicious(tmp_path / "run"), checkpoint / name)
    resumed = trainer_for(tmp_path, models.clip(seed=1), **options)
    with pytest.raises(ValueError, match=f"{name} has"):  # detected by size or checksum
        resumed.train(resume_from_checkpoint=str(checkpoint))
    monkeypatch.setattr(checkpoints, "damage", lambda checkpoint: None)  # as if its manifest had been forged
    if name == "training_args.bin":
        resumed.train(resume_from_checkpoint=str(checkpoint))  # does not read the malicious file
    else:
        with pytest.raises(pickle.UnpicklingError):
            resumed.train(resume_from_checkpoint=str(checkpoint))
    for missing in ("infcl_run.json", "infcl_manifest.json"):
        (checkpoint / missing).unlink()
    with pytest.raises(ValueError, match="another trainer wrote it"):
        resumed.train(resume_from_checkpoint=str(checkpoint))
    assert not (tmp_path / "run").exists()


def test_weights_are_saved_without_pickles(tmp_path):
    trainer = trainer_for(tmp_path, max_steps=1)
    trainer.save_model()
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors", "training_args.bin"}


FOUND = {"name": "one", "version": "1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1"]}]}
FINE = {"name": "two", "version": "2.0", "vulns": []}
SKIPPED = {"name": "three", "skip_reason": "not found on PyPI"}


def test_an_audit_that_reached_nothing_says_so(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from audit import summary

    text, code = summary([SKIPPED, SKIPPED])
    assert text.startswith("WARNING: no advisory could be reached")
    assert code == 0
    assert summary([FINE, SKIPPED]) == ("1 of 2 packages were audited, with 0 known vulnerabilities.", 0)
    text, code = summary([FOUND, FINE])
    assert "one 1.0: PYSEC-1, mended in 1.1" in text
    assert code == 1


def test_a_class_is_found_once_by_its_name():
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "hf_infcl").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: where for name, where in places.items() if len(where) > 1}
