"""The packages of hf_infcl: which imports are forbidden, that there are no cycles, and which packages are required."""

import ast
import functools
import graphlib
import io
import re
import subprocess
import sys
import tokenize
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


# The modules of options that declare them.
DECLARING = ("commands", "contrastive", "declaring")

# Of modules that read options, so that a mistyped one is answered at once.
WITHOUT_TORCH = (
    *("torch", *HUGGING_FACE),
    *inside("kernels", "processes", "loss", "models", "data", "step", "quality", "trainer"),
    *(f"hf_infcl.options.{path.stem}" for path in PACKAGE.glob("options/[a-z]*.py") if path.stem not in DECLARING),
)

# What a package, or a module in it, must neither import nor reach through an attribute of torch. If several names
# apply, the longest one counts. That a package imports only those above it in CONTRIBUTING's table is another test. The
# command may name in types what it does not import when it runs.
MUST_NOT_KNOW = {
    "hf_infcl": ("torch", *HUGGING_FACE, "triton"),
    "hf_infcl.__main__": ("torch", *inside("loss", "data", "evaluation", "options", "step", "trainer")),
    "hf_infcl.refusals": ("hf_infcl", *HUGGING_FACE, "triton", *DISTRIBUTED),
    "hf_infcl.files": ("hf_infcl", "torch", "transformers", "accelerate", "datasets", "evaluate"),
    "hf_infcl.files.whole": ("hf_infcl", "torch", *HUGGING_FACE),
    "hf_infcl.files.text": ("hf_infcl", "torch", *HUGGING_FACE),
    "hf_infcl.processes": (*HUGGING_FACE, "triton"),
    "hf_infcl.processes.launcher": ("hf_infcl", "torch", *HUGGING_FACE, "triton"),
    "hf_infcl.kernels": ("torch.autograd", *DISTRIBUTED, *HUGGING_FACE),
    "hf_infcl.kernels.torch_backend": ("torch.autograd", *DISTRIBUTED, *HUGGING_FACE, "triton"),
    "hf_infcl.loss": HUGGING_FACE,
    "hf_infcl.loss.reference": ("hf_infcl", *HUGGING_FACE, "triton", *DISTRIBUTED),
    "hf_infcl.loss.cuda_graphs": ("hf_infcl", *HUGGING_FACE, "triton", *DISTRIBUTED),
    "hf_infcl.loss.strategies": (*HUGGING_FACE, *inside("kernels.triton_backend", "loss.contrastive", "loss.inputs")),
    "hf_infcl.evaluation": (*DISTRIBUTED, *HUGGING_FACE),
    "hf_infcl.evaluation.hub_metrics": (*DISTRIBUTED, *TRAINER, *MODELS),
    "hf_infcl.shards": ("torch", "transformers", "accelerate", "evaluate"),
    "hf_infcl.models": (*TRAINER, "datasets", "evaluate", *inside("loss", "kernels")),
    "hf_infcl.models.sharding": (*TRAINER[:2], "datasets", "evaluate", *inside("loss", "kernels")),
    **dict.fromkeys(
        inside("models.pretrained", *(f"models.open_clip{part}" for part in ("", "_names", "_inputs"))),
        (*TRAINER, *DISTRIBUTED, "datasets", "evaluate", *inside("processes", "kernels", "loss")),
    ),
    "hf_infcl.optim": (*HUGGING_FACE, *inside("loss", "models")),
    "hf_infcl.optim.groups": ("hf_infcl", *HUGGING_FACE, *DISTRIBUTED),
    "hf_infcl.options": (*TRAINER, *MODELS, *DISTRIBUTED, *inside("kernels", "optim")),
    "hf_infcl.options.arguments": (*TRAINER[:2], *MODELS, *DISTRIBUTED, *inside("optim")),
    "hf_infcl.options.record": ("transformers.Trainer", *MODELS, *inside("kernels", "loss")),
    **dict.fromkeys((f"hf_infcl.options.{name}" for name in DECLARING), WITHOUT_TORCH),
    # A function there imports the table of its choices.
    "hf_infcl.options.contrastive": ("torch", *HUGGING_FACE, *inside("processes", "data", "step", "trainer")),
    "hf_infcl.data": (*MODELS, *TRAINER, *DISTRIBUTED, *inside("loss", "kernels", "step")),
    "hf_infcl.data.loader": ("transformers", *inside("loss", "kernels", "step")),
    # It asks for the number of processes, to refuse that all of them read the same.
    "hf_infcl.data.streams": (*MODELS, *TRAINER, *inside("loss", "kernels", "processes", "step")),
    "hf_infcl.step": (*TRAINER[:2], *MODELS, *DISTRIBUTED, *inside("kernels", "data", "optim")),
    "hf_infcl.step.checks": (*TRAINER[:2], *MODELS, *inside("kernels", "data", "optim")),
    "hf_infcl.step.terms": (*TRAINER[:2], *MODELS, *inside("kernels", "data", "optim")),
    "hf_infcl.step.extensions": (*TRAINER[:2], *MODELS, *inside("kernels", "data", "optim")),
    "hf_infcl.step.window": (*TRAINER[:2], *MODELS, *DISTRIBUTED, *inside("kernels", "data", "optim")),
    "hf_infcl.step.own_loop": (*HUGGING_FACE, *inside("kernels", "data", "models", "options")),
    "hf_infcl.step.wrappers": (*HUGGING_FACE, *inside("kernels", "loss", "data", "models", "options")),
    "hf_infcl.step.grad_cache": (
        *HUGGING_FACE,
        *inside("kernels", "loss", "data", "models", "options", "step.wrappers"),
    ),
    "hf_infcl.quality": (*TRAINER[:2], *MODELS, *DISTRIBUTED, *inside("kernels", "evaluation.tasks")),
    "hf_infcl.trainer": inside("loss.reference"),
    "hf_infcl.trainer.trainer": inside("kernels", "loss.reference"),
    "hf_infcl.trainer.checkpoints": ("transformers.Trainer", *MODELS, *inside("kernels", "loss", "step", "models")),
    "hf_infcl.trainer.construction": (*TRAINER[:2], *inside("kernels", "loss", "trainer.trainer")),
    "hf_infcl.card": (
        *(*TRAINER, *DISTRIBUTED, *inside("kernels", "processes", "trainer.trainer")),
        *(f"hf_infcl.data.{path.stem}" for path in (PACKAGE / "data").glob("[a-z]*.py") if path.stem != "replay"),
        *(f"hf_infcl.loss.{path.stem}" for path in (PACKAGE / "loss").glob("[a-z]*.py") if path.stem != "objectives"),
    ),
    "hf_infcl.cli": inside("kernels", "loss.contrastive"),
    "hf_infcl.cli.commands": WITHOUT_TORCH,
    "hf_infcl.cli.benchmarks": (
        *TRAINER,
        *MODELS,
        *DISTRIBUTED,
        "transformers",
        *inside("processes", "trainer", "card"),
    ),
    "hf_infcl.cli.checking": (*TRAINER, *MODELS, *DISTRIBUTED, *inside("processes", "loss", "trainer", "card")),
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
    return "" if name == "hf_infcl" else name


def package_of(module: str) -> str:
    """The package of `hf_infcl` that holds a module, as CONTRIBUTING names it."""
    return module.split(".")[1] if "." in module else ""


def test_rules_are_of_modules_that_exist():
    assert set(MUST_NOT_KNOW) <= set(modules())


@pytest.mark.parametrize("module", modules())
def test_no_module_knows_what_it_must_not(module):
    own = {"hf_infcl.__version__"} if module != "hf_infcl" else set()
    for name in (
        names_used(module, modules()[module], with_types=not module.startswith(("hf_infcl.cli", "hf_infcl.card"))) - own
    ):
        for forbidden in rules(module):
            if forbidden != "hf_infcl" and reaches(module, forbidden):
                continue  # the module's own package
            assert not reaches(name, forbidden), f"{module} must not know {forbidden}, but uses {name}"


def test_a_package_imports_only_those_on_lower_floors_of_the_table_of_contributing():
    contributing = Path(__file__).parents[1].joinpath("CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| `(\w+?)(?:\.py|/)` \|", contributing, re.MULTILINE)
    floor = {package: int(number) for number, package in rows}
    every = {module: path for module, path in modules().items() if package_of(module) not in ("", "__main__")}
    assert len(rows) == len(floor)
    assert set(floor) == {package_of(module) for module in every}
    assert set(floor.values()) == set(range(1, 9))
    for module, path in every.items():
        for name in names_used(module, path):
            imported = package_of(owner(name, every))
            if imported not in ("", package_of(module)):
                assert floor[imported] < floor[package_of(module)], f"{module} imports {name}"


def test_no_import_comes_back_to_itself():
    every = modules()
    graph = {}
    for module, path in every.items():
        if module != "hf_infcl":  # the package names all of them, and imports them on first use
            graph[module] = {o for n in names_used(module, path) if (o := owner(n, every)) not in (module, "")}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


# Lines of code, without comments and docstrings, that a package has at most.
BUDGETS = {
    **{"files": 172, "processes": 539, "kernels": 1610, "evaluation": 449, "refusals": 40},
    **{"loss": 1159, "shards": 886, "models": 1876, "optim": 332, "options": 674, "data": 2445, "step": 2068},
    **{"quality": 953, "trainer": 2121, "card": 844, "cli": 2212},
}


def lines_of_code(path: Path) -> int:
    """The lines of a file with a token, without comments and docstrings."""
    source = path.read_text(encoding="utf-8")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    no_code = ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if tokenize.tok_name[token.type] not in no_code:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def test_every_package_keeps_to_its_budget():
    lines: dict[str, int] = {}
    for module, path in modules().items():
        if package_of(module) not in ("", "__main__"):
            lines[package_of(module)] = lines.get(package_of(module), 0) + lines_of_code(path)
    assert {package: count for package, count in lines.items() if count > BUDGETS[package]} == {}
    assert set(lines) == set(BUDGETS)


def test_lines_of_code_are_those_with_a_token(tmp_path):
    (tmp_path / "m.py").write_text('"""A module."""\n\nx = (  # a comment\n    1,\n\n    2,\n)\n# a comment\n')
    assert lines_of_code(tmp_path / "m.py") == 4


def test_the_reading_of_imports(tmp_path):
    lines = (
        "import torch",
        "if TYPE_CHECKING:",
        "    from ..trainer import T",
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
    assert names_used("hf_infcl.kernels.m", tmp_path / "m.py") == used | {"hf_infcl.trainer.T"}


def test_a_torchvision_that_does_not_fit_is_named_with_its_cure_where_it_is_needed(tmp_path):
    """transformers' own message is only that it could not import one of its classes. The data package needs none."""
    (tmp_path / "torchvision").mkdir()
    failing = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (tmp_path / "torchvision" / "__init__.py").write_text(failing)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from hf_infcl import ContrastiveCollator, ImageTextDataset
from hf_infcl import cli
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
