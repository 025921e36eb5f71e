"""The rooms of the package: which imports are forbidden, that there are no cycles, and which packages are required."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hf_infcl

PACKAGE = Path(hf_infcl.__file__).parent
HUGGING_FACE = ("transformers", "accelerate", "datasets", "evaluate", "huggingface_hub", "tokenizers")
TRAINER = ("transformers.Trainer", "transformers.trainer", "accelerate")
MODELS = ("transformers.AutoModel", "transformers.PreTrainedModel")
DISTRIBUTED = ("torch.distributed",)


def rooms(*names: str) -> tuple[str, ...]:
    return tuple(f"hf_infcl.{name}" for name in names)


# The rooms of the training.
TRAINING = ("options", "windows", "loading", "saving", "training")

# The modules of options that declare them.
DECLARING = (
    *("declared", "declaring", "facts", "theirs", "model_options"),
    *("batch_options", "course_options", "keeping_options", "loss_options", "rate_options", "selection_options"),
    *("teacher_options", "tower_options", "evaluation_options"),
)

# Of modules that read options, so that a mistyped one is answered at once.
WITHOUT_TORCH = (
    *("torch", *HUGGING_FACE),
    *rooms("reference", "kernels", "processes", "loss", "data", "windows", "loading", "training"),
    *(f"hf_infcl.options.{path.stem}" for path in PACKAGE.glob("options/[a-z]*.py") if path.stem not in DECLARING),
)

# What a room, or a module in it, must neither import nor reach through an attribute of torch. If several names apply,
# the longest one counts.
MUST_NOT_KNOW = {
    "hf_infcl": ("torch", *HUGGING_FACE, "triton"),
    "hf_infcl.reference": ("hf_infcl", *HUGGING_FACE, "triton", *DISTRIBUTED),
    "hf_infcl.processes": (*HUGGING_FACE, "triton"),
    "hf_infcl.processes.launcher": ("hf_infcl", "torch", *HUGGING_FACE, "triton"),
    "hf_infcl.kernels": (
        *("torch.autograd", *DISTRIBUTED, *HUGGING_FACE),
        *rooms("processes", "loss", "data", "evaluation", *TRAINING, "publishing"),
    ),
    "hf_infcl.kernels.torch_backend": ("torch.autograd", *DISTRIBUTED, *HUGGING_FACE, "triton"),
    "hf_infcl.loss": (*HUGGING_FACE, *rooms("data", "evaluation", *TRAINING, "publishing")),
    "hf_infcl.loss.cuda_graphs": ("hf_infcl", *HUGGING_FACE, "triton", *DISTRIBUTED),
    "hf_infcl.loss.ring": (*HUGGING_FACE, *rooms("kernels", "loss.contrastive", "loss.inputs", "loss.strategies")),
    "hf_infcl.shards": (
        *("torch", "transformers", "accelerate", "evaluate"),
        *rooms("processes", "kernels", "loss", "data", "evaluation", *TRAINING, "publishing"),
    ),
    "hf_infcl.shards.urls": ("torch", "hf_infcl", *HUGGING_FACE),
    "hf_infcl.data": (
        *(*MODELS, *TRAINER, *DISTRIBUTED),
        *rooms("kernels", "processes", "loss", "evaluation", *TRAINING, "publishing"),
    ),
    "hf_infcl.data.streams": (  # asks for the number of processes, to refuse that all of them read the same
        *(*MODELS, *TRAINER),
        *rooms("kernels", "processes", "loss", "evaluation", *TRAINING, "publishing"),
    ),
    "hf_infcl.evaluation": (
        *(*DISTRIBUTED, *HUGGING_FACE),
        *rooms("processes", "kernels", "loss", "data", *TRAINING, "publishing"),
    ),
    "hf_infcl.evaluation.ranking": ("hf_infcl", *HUGGING_FACE, *DISTRIBUTED),
    "hf_infcl.evaluation.hub_metrics": (
        *(*DISTRIBUTED, *TRAINER, *MODELS),
        *rooms("processes", "kernels", "loss", "data", *TRAINING, "publishing"),
    ),
    "hf_infcl.passes": (*HUGGING_FACE, *rooms("kernels", "loss", "data", "checkpoints")),
    "hf_infcl.passes.grad_cache": (
        *HUGGING_FACE,
        *rooms("processes", "kernels", "loss", "data", "checkpoints", "passes.wrappers", "passes.graph_budget"),
    ),
    "hf_infcl.passes.random_state": ("hf_infcl", *HUGGING_FACE),
    "hf_infcl.checkpoints": ("transformers.Trainer", *MODELS, *rooms("kernels", "loss", "passes")),
    "hf_infcl.averaging": (*HUGGING_FACE, *DISTRIBUTED, *rooms("kernels", "loss", "data", "training", "publishing")),
    "hf_infcl.benchmarks": (
        *(*TRAINER, *MODELS, *DISTRIBUTED, "transformers"),
        *rooms("kernels", "processes", "loss", *TRAINING, "publishing", "cli"),
    ),
    "hf_infcl.benchmarks.names": ("torch", "hf_infcl", *HUGGING_FACE),
    "hf_infcl.encoders": (*TRAINER, *rooms("kernels", "loss", "data", "passes", "checkpoints")),
    "hf_infcl.encoders.sharding": (*TRAINER[:2], *rooms("kernels", "loss", "data", "passes", "checkpoints")),
    "hf_infcl.conversion": (
        *(*TRAINER, *DISTRIBUTED, "datasets", "evaluate"),
        *rooms("processes", "kernels", "loss", "passes", "checkpoints", "data", "evaluation", "encoders", "training"),
    ),
    "hf_infcl.optimizers": (*HUGGING_FACE, *rooms("kernels", "loss", "passes", "data", "evaluation", "encoders")),
    "hf_infcl.optimizers.newton_schulz": ("hf_infcl", *HUGGING_FACE, *DISTRIBUTED),
    "hf_infcl.optimizers.groups": ("hf_infcl", *HUGGING_FACE, *DISTRIBUTED),
    "hf_infcl.options": (
        *(*TRAINER, *MODELS, *DISTRIBUTED),
        *rooms("reference", "kernels", "loss", "processes", "passes", "checkpoints", "optimizers", "publishing"),
    ),
    "hf_infcl.options.arguments": (
        *(*TRAINER[:2], *MODELS, *DISTRIBUTED),
        *rooms("data", "passes", "checkpoints", "optimizers"),
    ),
    "hf_infcl.options.combinations": (
        *("torch", "transformers"),
        *rooms("reference", "kernels", "processes", "loss", "encoders", "data", "windows", "loading", "training"),
    ),
    **dict.fromkeys((f"hf_infcl.options.{name}" for name in DECLARING), WITHOUT_TORCH),
    # Functions there import the tables of their choices.
    "hf_infcl.options.loss_options": ("torch", *HUGGING_FACE, *rooms("processes", "data", "windows", "training")),
    "hf_infcl.options.tower_options": ("torch", *HUGGING_FACE, *rooms("processes", "data", "windows", "training")),
    "hf_infcl.options.muon_options": ("torch", "hf_infcl", *HUGGING_FACE),
    "hf_infcl.windows": (
        *(*TRAINER[:2], *MODELS, *DISTRIBUTED),
        *rooms("reference", "kernels", "data", "evaluation", "optimizers", "publishing"),
    ),
    "hf_infcl.windows.observers": (*TRAINER[:2], *MODELS, *rooms("kernels", "data", "optimizers", "options")),
    "hf_infcl.windows.start": (*TRAINER[:2], *MODELS, *rooms("kernels", "loss", "data", "optimizers", "options")),
    "hf_infcl.windows.window": (*HUGGING_FACE, *DISTRIBUTED, *rooms("kernels", "data", "options")),
    "hf_infcl.windows.nonfinite": (*HUGGING_FACE, *rooms("kernels", "loss", "data", "options")),
    "hf_infcl.windows.skipping": ("torch.autograd", "accelerate", *rooms("kernels", "loss", "data", "options")),
    "hf_infcl.loading": (
        *(*TRAINER[:2], *MODELS, *DISTRIBUTED),
        *rooms("reference", "kernels", "loss", "evaluation", "optimizers", "publishing"),
    ),
    "hf_infcl.loading.feature_cache": (*MODELS, *TRAINER, *rooms("loss", "kernels", "windows")),
    "hf_infcl.loading.data_wait": ("hf_infcl", *HUGGING_FACE),
    "hf_infcl.loading.stream_loader": ("transformers", *rooms("loss", "windows")),
    "hf_infcl.loading.batch_checks": ("transformers", *rooms("loss", "windows")),
    "hf_infcl.loading.sampling": (*HUGGING_FACE, *rooms("loss", "windows")),
    "hf_infcl.saving": (
        *("transformers.Trainer", *MODELS, *DISTRIBUTED),
        *rooms("reference", "kernels", "loss", "windows", "loading", "evaluation", "optimizers", "publishing"),
    ),
    "hf_infcl.embedding": (
        *(*TRAINER, *MODELS, *DISTRIBUTED),
        *rooms("reference", "kernels", "loss", "windows", "training", "publishing"),
    ),
    "hf_infcl.embedding.options": WITHOUT_TORCH,
    "hf_infcl.scoring": (*TRAINER, *MODELS, *DISTRIBUTED, *rooms("reference", "kernels", "training", "publishing")),
    "hf_infcl.scoring.options": WITHOUT_TORCH,
    "hf_infcl.training": rooms("reference", "publishing"),
    "hf_infcl.training.trainer": rooms("kernels", "reference", "publishing"),
    "hf_infcl.training.preparation": (*TRAINER[:2], *rooms("kernels", "loss", "data", "training.trainer")),
    "hf_infcl.planning": (*TRAINER, *DISTRIBUTED, *rooms("kernels", "data", "evaluation", "publishing", "cli")),
    "hf_infcl.checking": (
        *(*MODELS, *TRAINER, *DISTRIBUTED),
        *rooms("processes", "kernels", "loss", "evaluation", *TRAINING, "planning", "publishing", "cli"),
    ),
    "hf_infcl.cli.commands": WITHOUT_TORCH,
    "hf_infcl.cli.command_options": WITHOUT_TORCH,
    "hf_infcl.cli": rooms("reference", "kernels", "loss"),
    "hf_infcl.__main__": rooms("reference", "kernels", "loss", "data", "evaluation", *TRAINING, "publishing"),
    "hf_infcl.publishing": (
        *TRAINER,
        *DISTRIBUTED,
        *rooms("kernels", "processes", "training.trainer"),
        *(f"hf_infcl.evaluation.{p.stem}" for p in (PACKAGE / "evaluation").glob("[a-z]*.py") if p.stem != "metrics"),
        *(f"hf_infcl.data.{path.stem}" for path in (PACKAGE / "data").glob("[a-z]*.py") if path.stem != "urls"),
        *(f"hf_infcl.loss.{path.stem}" for path in (PACKAGE / "loss").glob("[a-z]*.py") if path.stem != "objectives"),
    ),
}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["hf_infcl", *path.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def names_used(module: str, path: Path) -> set[str]:
    """The full names of everything that the file imports anywhere, and all chains of attributes from torch."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    used = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")
            above = above[: len(above) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            used |= {f"{source}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and (chain := ast.unparse(node)).startswith("torch."):
            used.add(chain)
    return used


def reaches(name: str, target: str) -> bool:
    return name == target or name.startswith(f"{target}.")


def rules(module: str) -> tuple[str, ...]:
    """The rules of the module itself or of the innermost room around it. Those of the package are for `__init__.py`."""
    while module not in MUST_NOT_KNOW:
        module = module.rpartition(".")[0]
        assert module != "hf_infcl", "a new room needs its rules"
    return MUST_NOT_KNOW[module]


def owner(name: str, every: dict[str, Path]) -> str:
    """The module that contains a name, "" outside the package. `hf_infcl.data.images.x` is not in the room `data`."""
    while name not in every:
        name = name.rpartition(".")[0]
        if not name:
            return ""
    return "" if name == "hf_infcl" else name


def test_rules_are_of_modules_that_exist():
    assert set(MUST_NOT_KNOW) <= set(modules())


@pytest.mark.parametrize("module", modules())
def test_no_module_knows_what_it_must_not(module):
    own = {"hf_infcl.__version__"} if module != "hf_infcl" else set()
    for name in names_used(module, modules()[module]) - own:
        for forbidden in rules(module):
            if forbidden != "hf_infcl" and reaches(module, forbidden):
                continue  # the module's own room
            assert not reaches(name, forbidden), f"{module} must not know {forbidden}, but uses {name}"


def test_a_room_imports_only_those_above_it_in_the_table_of_contributing():
    contributing = Path(__file__).parents[1].joinpath("CONTRIBUTING.md").read_text(encoding="utf-8")
    table = contributing.partition("| where | what |")[0]
    order = re.findall(r"^\| `(\w+)(?:\.py|/)` \|", table, re.MULTILINE)
    every = {module: path for module, path in modules().items() if module not in ("hf_infcl", "hf_infcl.__main__")}
    place = {module: order.index(module.split(".")[1]) for module in every}
    assert len(order) == len(set(place.values()))
    for module, path in every.items():
        for name in names_used(module, path):
            if imported := owner(name, every):
                assert place[imported] <= place[module], f"{module} imports {imported}"


def test_no_import_comes_back_to_itself():
    every = modules()
    graph = {}
    for module, path in every.items():
        if module != "hf_infcl":  # the package names all rooms, and imports them on first use
            graph[module] = {o for n in names_used(module, path) if (o := owner(n, every)) not in (module, "")}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_no_file_and_no_room_is_too_long():
    """At most 450 lines in a file, except for the Hopper kernels, and 2,800 in a room."""
    rooms_of: dict[str, int] = {}
    for module, path in modules().items():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= 450 or module == "hf_infcl.kernels.hopper_kernels", f"{path} has {lines} lines"
        room = path.parent.name
        rooms_of[room] = rooms_of.get(room, 0) + lines
    assert {room: lines for room, lines in rooms_of.items() if lines > 2800} == {}


def test_the_reading_of_imports(tmp_path):
    lines = (
        "import torch",
        "def f():",
        "    from .ring import Ring",
        "    from ..losses import x",
        "    torch.distributed.barrier()",
    )
    (tmp_path / "m.py").write_text("\n".join(lines))
    assert names_used("hf_infcl.kernels.m", tmp_path / "m.py") == {
        "torch",
        "hf_infcl.kernels.ring.Ring",
        "hf_infcl.losses.x",
        "torch.distributed",
        "torch.distributed.barrier",
    }


def test_import_needs_only_torch_and_the_trainer_s_packages():
    """Without the optional packages the loss runs, and everything that the trainer imports can be imported."""
    code = """
import sys
for name in ("triton", "datasets", "evaluate", "matplotlib", "sklearn"):
    sys.modules[name] = None  # importing it raises ImportError
import torch, hf_infcl, hf_infcl.training.trainer, hf_infcl.publishing
for name in hf_infcl.__all__:
    getattr(hf_infcl, name)
x = torch.eye(4)
loss = hf_infcl.contrastive_loss(x, x, 1.0)
assert abs(loss.item() - torch.nn.functional.cross_entropy(x, torch.arange(4)).item()) < 1e-6, loss
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "from hf_infcl import InfCLTrainer",
        "from hf_infcl import cli; cli.main('train', ['--model', 'm', '--dataset', 'd'])",
    ],
)
def test_a_torchvision_that_does_not_fit_is_named_with_its_cure(tmp_path, line):
    """transformers' own message is only that it could not import one of its classes."""
    (tmp_path / "torchvision").mkdir()
    failing = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (tmp_path / "torchvision" / "__init__.py").write_text(failing)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {line}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        f"ImportError: The installed torchvision does not fit torch {torch.__version__} (RuntimeError"
    )
    assert "pip uninstall torchvision" in last


def test_the_data_room_needs_no_torchvision_that_fits(tmp_path):
    (tmp_path / "torchvision.py").write_text("raise RuntimeError")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from hf_infcl import ContrastiveCollator, ImageTextDataset"
    )
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)


def test_import_alone_is_light():
    code = "import sys, hf_infcl; print([n for n in ('torch', 'transformers') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
