"""The names of benchmarks, the groups that they form, and the metric by which each is known.

Names and groups are those of CLIP_benchmark (https://github.com/LAION-AI/CLIP_benchmark), whose own files say nothing
about metrics. These follow DataComp's list of tasks (https://github.com/mlfoundations/datacomp, ``tasklist.yml``).
"""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

import yaml

GROUPS: dict[str, tuple[str, ...]] = {}
for _group, _names in yaml.safe_load(Path(__file__).with_name("benchmarks.yaml").read_text(encoding="utf-8")).items():
    GROUPS[_group] = tuple(dict.fromkeys(one for name in _names.split() for one in GROUPS.get(name, (name,))))
_ALONE = ("imagenet-o", "vtab/dsprites_label_y_position")
_OF_GROUPS = (name for group in ("vtab+", "retrieval", "sugarcrepe") for name in GROUPS[group])
OF_CLIP_BENCHMARK = tuple(dict.fromkeys([*_OF_GROUPS, *_ALONE]))
BENCHMARKS = (*OF_CLIP_BENCHMARK, *GROUPS["sugarcrepe++"], *GROUPS["xm3600"])

# The metrics whose mean is the score of a benchmark, where its kind has a different one.
MAIN_METRICS = dict.fromkeys(
    ("vtab/caltech101", "vtab/flowers", "vtab/pets", "fgvc_aircraft"), ("mean_per_class_recall",)
)


def expanded(names: Iterable[str], folder: str | None = None) -> list[str]:
    """The benchmarks of names and groups, each once.

    Args:
        names: benchmarks, also by the last part of the names of CLIP_benchmark ("cifar10"); groups; and repositories of
            the Hub in the layout of CLIP_benchmark ("djghosh/wds_cars_test").
        folder: the folder of local copies, which may hold other benchmarks than the known ones.

    Raises:
        ValueError: there is none of a name; the message has the nearest ones.
    """
    by_last = {name.rpartition("/")[2]: name for name in OF_CLIP_BENCHMARK}
    benchmarks: list[str] = []
    for name in names:
        if name in GROUPS:
            benchmarks += GROUPS[name]
        elif name in BENCHMARKS:
            benchmarks.append(name)
        elif name in by_last:
            benchmarks.append(by_last[name])
        elif _is_repository(name) if folder is None else Path(folder, folder_name(name)).is_dir():
            benchmarks.append(name)
        else:
            nearest = difflib.get_close_matches(name, [*GROUPS, *BENCHMARKS, *by_last], n=3, cutoff=0.5)
            known = ", ".join(OF_CLIP_BENCHMARK)
            hint = f"Did you mean {' or '.join(nearest)}?" if nearest else f"There are {known}."
            raise ValueError(
                f"There is no benchmark {name!r}. {hint} The groups are {', '.join(GROUPS)}. A set of your own is the "
                f"folder {folder_name(name)!r} in --benchmark_folder, or a repository OWNER/NAME of the Hub."
            )
    return list(dict.fromkeys(benchmarks))


def _is_repository(name: str) -> bool:
    """Whether it can be a repository of the Hub; ``vtab/...`` is none, but a family of benchmarks."""
    families = {known.partition("/")[0] for known in BENCHMARKS}
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and name.partition("/")[0] not in families


def folder_name(name: str) -> str:
    """The last part of the repository of a benchmark, and the name of the folder of a local copy."""
    return f"wds_{name.replace('/', '-')}"


def benchmark_key(name: str) -> str:
    """The name of a benchmark within its metrics: "vtab/cifar10" is measured as ``eval_vtab_cifar10_acc1``."""
    return re.sub(r"\W+", "_", name.replace("+", "_plus"))
