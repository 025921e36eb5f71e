"""The packages of hf_infcl: which imports are forbidden, that there are no cycles, and which packages are required."""

import ast
import functools
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


def inside(*names: str) -> tuple[str, ...]:
    return tuple(f"hf_infcl.{name}" for name in names)


# The packages of the training.
TRAINING = ("options", "windows", "micro_batches", "loading", "training")

# The modules of options that declare them.
DECLARING = (*("commands", "contrastive", "declaring", "facts", "theirs"),)

# Of modules that read options, so that a mistyped one is answered at once.
WITHOUT_TORCH = (
    *("torch", *HUGGING_FACE),
    *inside("reference", "kernels", "processes", "loss", "data", "windows", "loading", "training"),
    *(f"hf_infcl.options.{path.stem}" for path in PACKAGE.glob("options/[a-z]*.py") if path.stem not in DECLARING),
)

# What a package, or a module in it, must neither import nor reach through an attribute of torch. If several names
# apply, the longest one counts. The tools may name in types what they do not import when they run.
MUST_NOT_KNOW = {
    "hf_infcl.tools": ("torch", "hf_infcl", *HUGGING_FACE),
    "hf_infcl": ("torch", *HUGGING_FACE, "triton"),
    "hf_infcl.reference": ("hf_infcl", *HUGGING_FACE, "triton", *DISTRIBUTED),
    "hf_infcl.refusals": ("hf_infcl", *HUGGING_FACE, "triton", *DISTRIBUTED),
    "hf_infcl.readable": ("hf_infcl", "torch", *HUGGING_FACE),
    "hf_infcl.hub": ("hf_infcl", "torch", "transformers", "accelerate", "datasets", "evaluate"),
    "hf_infcl.processes": (*HUGGING_FACE, "triton"),
    "hf_infcl.processes.launcher": ("hf_infcl", "torch", *HUGGING_FACE, "triton"),
    "hf_infcl.kernels": (
        *("torch.autograd", *DISTRIBUTED, *HUGGING_FACE),
        *inside("processes", "loss", "data", "evaluation", *TRAINING, "tools"),
    ),
    "hf_infcl.kernels.torch_backend": ("torch.autograd", *DISTRIBUTED, *HUGGING_FACE, "triton"),
    "hf_infcl.loss": (*HUGGING_FACE, *inside("data", "evaluation", *TRAINING, "tools")),
    "hf_infcl.loss.cuda_graphs": ("hf_infcl", *HUGGING_FACE, "triton", *DISTRIBUTED),
    "hf_infcl.loss.ring": (*HUGGING_FACE, *inside("kernels", "loss.contrastive", "loss.inputs", "loss.strategies")),
    "hf_infcl.shards": (
        *("torch", "transformers", "accelerate", "evaluate"),
        *inside("processes", "kernels", "loss", "data", "evaluation", *TRAINING, "tools"),
    ),
    "hf_infcl.shards.urls": ("torch", "hf_infcl", *HUGGING_FACE),
    "hf_infcl.data": (
        *(*MODELS, *TRAINER, *DISTRIBUTED),
        *inside("kernels", "processes", "loss", "evaluation", *TRAINING, "tools"),
    ),
    "hf_infcl.data.streams": (  # asks for the number of processes, to refuse that all of them read the same
        *(*MODELS, *TRAINER),
        *inside("kernels", "processes", "loss", "evaluation", *TRAINING, "tools"),
    ),
    "hf_infcl.evaluation": (
        *(*DISTRIBUTED, *HUGGING_FACE),
        *inside("processes", "kernels", "loss", "data", *TRAINING, "tools"),
    ),
    "hf_infcl.evaluation.ranking": ("hf_infcl", *HUGGING_FACE, *DISTRIBUTED),
    "hf_infcl.evaluation.hub_metrics": (
        *(*DISTRIBUTED, *TRAINER, *MODELS),
        *inside("processes", "kernels", "loss", "data", *TRAINING, "tools"),
    ),
    "hf_infcl.passes": (*HUGGING_FACE, *inside("kernels", "loss", "data", "checkpoints")),
    "hf_infcl.passes.embedders": (*HUGGING_FACE, *inside("kernels", "data", "checkpoints")),
    "hf_infcl.passes.grad_cache": (
        *HUGGING_FACE,
        *inside("processes", "kernels", "loss", "data", "checkpoints", "passes.wrappers", "passes.graph_budget"),
    ),
    "hf_infcl.passes.random_state": ("hf_infcl", *HUGGING_FACE),
    "hf_infcl.checkpoints.averages": (
        *(*HUGGING_FACE, *DISTRIBUTED),
        *inside("kernels", "loss", "data", "training", "tools"),
    ),
    "hf_infcl.tools.benchmarks": (
        *(*TRAINER, *MODELS, *DISTRIBUTED, "transformers"),
        *inside("kernels", "processes", "loss", *TRAINING, "tools.publishing", "tools.cli"),
    ),
    "hf_infcl.tools.benchmarks.names": ("torch", "hf_infcl", *HUGGING_FACE),
    "hf_infcl.encoders": (*TRAINER, *inside("kernels", "loss", "data", "passes", "checkpoints")),
    "hf_infcl.encoders.sharding": (*TRAINER[:2], *inside("kernels", "loss", "data", "passes", "checkpoints")),
    "hf_infcl.conversion": (
        *(*TRAINER, *DISTRIBUTED, "datasets", "evaluate"),
        *inside("processes", "kernels", "loss", "passes", "checkpoints", "data", "evaluation", "training"),
    ),
    "hf_infcl.optimizers": (*HUGGING_FACE, *inside("kernels", "loss", "passes", "data", "evaluation", "encoders")),
    "hf_infcl.optimizers.newton_schulz": ("hf_infcl", *HUGGING_FACE, *DISTRIBUTED),
    "hf_infcl.optimizers.groups": ("hf_infcl", *HUGGING_FACE, *DISTRIBUTED),
    "hf_infcl.options": (
        *(*TRAINER, *MODELS, *DISTRIBUTED),
        *inside("reference", "kernels", "loss", "processes", "passes", "checkpoints", "optimizers", "tools"),
    ),
    "hf_infcl.options.arguments": (
        *(*TRAINER[:2], *MODELS, *DISTRIBUTED),
        *inside("data", "passes", "checkpoints", "optimizers"),
    ),
    "hf_infcl.options.combinations": (
        *("torch", "transformers"),
        *inside("reference", "kernels", "processes", "loss", "encoders", "data", "windows", "loading", "training"),
    ),
    **dict.fromkeys((f"hf_infcl.options.{name}" for name in DECLARING), WITHOUT_TORCH),
    # A function there imports the table of its choices.
    "hf_infcl.options.contrastive": ("torch", *HUGGING_FACE, *inside("processes", "data", "windows", "training")),
    "hf_infcl.windows": (
        *(*TRAINER[:2], *MODELS, *DISTRIBUTED),
        *inside("reference", "kernels", "data", "evaluation", "optimizers", "tools"),
    ),
    "hf_infcl.windows.number_checks": (*TRAINER[:2], *MODELS, *inside("kernels", "data", "optimizers")),
    "hf_infcl.windows.observers": (*TRAINER[:2], *MODELS, *inside("kernels", "data", "optimizers", "options")),
    "hf_infcl.windows.terms": (*TRAINER[:2], *MODELS, *inside("kernels", "loss", "data", "optimizers", "options")),
    "hf_infcl.windows.window": (*HUGGING_FACE, *DISTRIBUTED, *inside("kernels", "data", "options")),
    "hf_infcl.micro_batches": (
        *(*TRAINER[:2], *MODELS, *DISTRIBUTED),
        *inside("reference", "kernels", "data", "evaluation", "optimizers", "tools"),
    ),
    "hf_infcl.loading": (
        *(*TRAINER[:2], *MODELS, *DISTRIBUTED),
        *inside("reference", "kernels", "loss", "evaluation", "optimizers", "tools"),
    ),
    "hf_infcl.loading.feature_cache": (*MODELS, *TRAINER, *inside("loss", "kernels")),
    "hf_infcl.loading.sources": (*MODELS, *TRAINER, *DISTRIBUTED, *inside("loss", "kernels", "windows", "processes")),
    "hf_infcl.loading.data_wait": ("hf_infcl", *HUGGING_FACE),
    "hf_infcl.loading.training_loader": ("transformers", *inside("loss", "windows")),
    "hf_infcl.loading.batch_checks": ("transformers", *inside("loss", "windows")),
    "hf_infcl.loading.table_rows": (*HUGGING_FACE, *inside("loss", "windows")),
    "hf_infcl.checkpoints": (
        *("transformers.Trainer", *MODELS),
        *inside("reference", "kernels", "loss", "passes", "windows", "loading", "evaluation", "optimizers", "tools"),
    ),
    **dict.fromkeys(
        (f"hf_infcl.checkpoints.{name}" for name in ("files", "lock", "record")),
        ("transformers.Trainer", *MODELS, *inside("kernels", "loss", "passes", "encoders", "options", "conversion")),
    ),
    "hf_infcl.tools.scoring": (*TRAINER, *MODELS, *DISTRIBUTED, *inside("reference", "kernels", "training", "tools")),
    "hf_infcl.training": inside("reference", "tools"),
    "hf_infcl.training.trainer": inside("kernels", "reference", "tools"),
    "hf_infcl.training.preparation": (*TRAINER[:2], *inside("kernels", "loss", "data", "training.trainer")),
    "hf_infcl.tools.checking": (
        *(*MODELS, *TRAINER, *DISTRIBUTED),
        *inside("processes", "kernels", "loss", *TRAINING, "tools.publishing", "tools.cli"),
    ),
    "hf_infcl.tools.cli.commands": WITHOUT_TORCH,
    "hf_infcl.tools.cli": inside("reference", "kernels", "loss"),
    "hf_infcl.__main__": inside("reference", "kernels", "loss", "data", "evaluation", *TRAINING),
    "hf_infcl.tools.publishing": (
        *TRAINER,
        *DISTRIBUTED,
        *inside("kernels", "processes", "training.trainer"),
        *(f"hf_infcl.evaluation.{p.stem}" for p in (PACKAGE / "evaluation").glob("[a-z]*.py") if p.stem != "metrics"),
        *(f"hf_infcl.data.{path.stem}" for path in (PACKAGE / "data").glob("[a-z]*.py") if path.stem != "urls"),
        *(f"hf_infcl.loss.{path.stem}" for path in (PACKAGE / "loss").glob("[a-z]*.py") if path.stem != "objectives"),
    ),
}


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["hf_infcl", *path.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def names_used(module: str, path: Path, with_types: bool = True) -> set[str]:
    """The full names of everything that the file imports anywhere, and all chains of attributes from torch.

    Without types, they are not those that it imports under ``if TYPE_CHECKING:``.
    """
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    used = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [one for one in tree.body if with_types or not ast.unparse(one).startswith("if TYPE_CHECKING:")]
    for node in ast.walk(tree):
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
    """The rules of the module itself or of the innermost package around it; those of hf_infcl are for `__init__.py`."""
    while module not in MUST_NOT_KNOW:
        module = module.rpartition(".")[0]
        assert module != "hf_infcl", "a new package needs its rules"
    return MUST_NOT_KNOW[module]


def owner(name: str, every: dict[str, Path]) -> str:
    """The module that contains a name, "" outside hf_infcl. `hf_infcl.data.images.x` is not in the package `data`."""
    while name not in every:
        name = name.rpartition(".")[0]
        if not name:
            return ""
    return "" if name in ("hf_infcl", "hf_infcl.tools") else name


def package_of(module: str) -> str:
    """The package of `hf_infcl` that holds a module, as CONTRIBUTING names it: ``loss`` or ``tools/cli``."""
    parts = module.split(".")[1:]
    return "/".join(parts[: 2 if parts[:1] == ["tools"] else 1])


def test_rules_are_of_modules_that_exist():
    assert set(MUST_NOT_KNOW) <= set(modules())


@pytest.mark.parametrize("module", modules())
def test_no_module_knows_what_it_must_not(module):
    own = {"hf_infcl.__version__"} if module != "hf_infcl" else set()
    for name in names_used(module, modules()[module], with_types=not module.startswith("hf_infcl.tools.")) - own:
        for forbidden in rules(module):
            if forbidden != "hf_infcl" and reaches(module, forbidden):
                continue  # the module's own package
            assert not reaches(name, forbidden), f"{module} must not know {forbidden}, but uses {name}"


def test_a_package_imports_only_those_above_it_in_the_table_of_contributing():
    contributing = Path(__file__).parents[1].joinpath("CONTRIBUTING.md").read_text(encoding="utf-8")
    table = contributing.partition("| where | what |")[0]
    order = re.findall(r"^\| `([\w/]+?)(?:\.py|/)` \|", table, re.MULTILINE)
    every = {module: path for module, path in modules().items() if package_of(module) not in ("", "__main__", "tools")}
    place = {module: order.index(package_of(module)) for module in every}
    assert len(order) == len(set(place.values()))
    for module, path in every.items():
        for name in names_used(module, path):
            if imported := owner(name, every):
                assert place[imported] <= place[module], f"{module} imports {imported}"


def test_no_import_comes_back_to_itself():
    every = modules()
    graph = {}
    for module, path in every.items():
        if module != "hf_infcl":  # the package names all of them, and imports them on first use
            graph[module] = {o for n in names_used(module, path) if (o := owner(n, every)) not in (module, "")}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_no_file_and_no_package_is_too_long():
    """At most 450 lines in a file, except for the Hopper kernels, and 2,800 in a package, or 3,100 in `data`."""
    lines_of: dict[str, int] = {}
    for module, path in modules().items():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= 450 or module == "hf_infcl.kernels.hopper_kernels", f"{path} has {lines} lines"
        package = path.parent.name
        lines_of[package] = lines_of.get(package, 0) + lines
    assert {
        package: lines for package, lines in lines_of.items() if lines > (3100 if package == "data" else 2800)
    } == {}


def test_the_reading_of_imports(tmp_path):
    lines = (
        "import torch",
        "if TYPE_CHECKING:",
        "    from ..training import T",
        "def f():",
        "    from .ring import Ring",
        "    from ..losses import x",
        "    torch.distributed.barrier()",
    )
    (tmp_path / "m.py").write_text("\n".join(lines))
    used = {
        "torch",
        "hf_infcl.kernels.ring.Ring",
        "hf_infcl.losses.x",
        "torch.distributed",
        "torch.distributed.barrier",
    }
    assert names_used("hf_infcl.kernels.m", tmp_path / "m.py", with_types=False) == used
    assert names_used("hf_infcl.kernels.m", tmp_path / "m.py") == used | {"hf_infcl.training.T"}


def test_a_torchvision_that_does_not_fit_is_named_with_its_cure_where_it_is_needed(tmp_path):
    """transformers' own message is only that it could not import one of its classes. The data package needs none."""
    (tmp_path / "torchvision").mkdir()
    failing = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (tmp_path / "torchvision" / "__init__.py").write_text(failing)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from hf_infcl import ContrastiveCollator, ImageTextDataset
from hf_infcl.tools import cli
for use in (lambda: __import__("hf_infcl").InfCLTrainer, lambda: cli.main("train", ["--model", "m", "--dataset", "d"])):
    try:
        use()
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    message = f"The installed torchvision does not fit torch {torch.__version__} (RuntimeError"
    lines = [line for line in done.stdout.splitlines() if line.startswith(message)]
    assert ["pip uninstall torchvision" in line for line in lines] == [True, True], done.stdout


def test_import_alone_is_light():
    code = "import sys, hf_infcl; print([n for n in ('torch', 'transformers') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
