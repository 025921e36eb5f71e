#!/usr/bin/env python3
"""Trains with wrong captions and with teachers, several runs at a time; writes wrong_and_taught.csv.

    python scripts/real_pairs/wrong_and_taught.py --corpus outputs/real_pairs --output_dir outputs/wrong_and_taught

Each run is a CLIP of the experiments (``size``), 1,024 pairs × 576 steps (589,824 samples), with Muon at 4e-3 or AdamW
at 5e-4. ``wrong`` is the share of the training pairs that have the captions of another pair, the same ones in all runs,
or "titles": drawings of Open Clip Art have the titles of their files, also where these are those of their collections,
such as "lemon svg theme".
With ``oracle`` these are removed before the training; with ``cleaned``, those that a ledger calls wrong with at least
this probability: the ledger of a training with ``leave_out`` and the same captions or, for a fine-tuning, of its start.
``teacher`` says how a teacher teaches:
"stored" are its embeddings of the images as they are. Rows of "online", of the augmented images, were written before
teachers that run with the student went. "wider" are the stored ones rotated into half as many dimensions more, which
the student reaches through a trained linear map. "similarities"
replace the distance to the stored ones by the cross-entropy of the batch's similarities, with this ``weight`` λ beside
1 − λ of the contrastive loss, as OpenCLIP distils. ``taught_by`` is the teacher, which knows the right captions: a
model of this size after this many times the samples, perhaps without the pairs of a vendor. What is ``trained_on``
emoji is the base of the fine-tunings on clip art, for which new concepts and the validation set are those of clip art.
``batch`` are the pairs of a step, of which Trainer as ``method`` makes losses over 256; ``captions`` is the number that
an image gets in a step. "bf16 activations" compares that option with autocast. The parts that begin with "icons" are
for a corpus --with_icons and need a folder of their own: "icons" are the batches at 2,359,296 samples.
The columns are those of experiments.py: recall in another style (vendor), on new concepts, on the validation set, on
icons of a set that is not trained on (icon_set) and on new concepts of icons, in per cent, both directions averaged;
``auc`` and ``auc_of_ledger`` tell how well the averages of the rule and of the ledger separate right from wrong pairs
at the end, ``border`` is what the rule has chosen, ``right_left_out`` the share of the right pairs that it then leaves
out, ``unique_left_out`` of those whose name no other drawing has, and ``wrong_among_kept`` of the wrong ones.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for benchmarks and real_pairs

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_infcl.encoders.dual_encoder import DualEncoder
from hf_infcl.evaluation import retrieval_metrics
from hf_infcl.loss.pair_scores import pair_scores
from hf_infcl.passes.grad_cache import Features
from hf_infcl.processes.collectives import Processes
from hf_infcl.tools.scoring.ledger import probability_wrong
from hf_infcl.windows.extensions import LossTerm, of_kind
from hf_infcl.windows.selection import WithoutNoisyPairs, mean_of_trained
from hf_infcl.windows.terms import SIDES, TeacherDistance
from real_pairs import fine_tuning, side_by_side, training
from real_pairs.in_memory import normalised, prepare
from real_pairs.side_by_side import save
from real_pairs.wrong_and_taught_runs import (
    MICRO_BATCH,
    PLAIN,
    RATES,
    SAMPLES,
    TUNING_BATCH,
    TUNING_SAMPLES,
    make_jobs,
    needed_by,
    of_teachers,
    with_icons,
)


def with_wrong_captions(data: dict[str, Any], wrong: float | str) -> tuple[dict[str, Any], Tensor, Tensor]:
    """The data with wrong captions, the pair whose captions each pair has, and whether they are wrong, [pairs] each."""
    device, pairs = data["images"].device, torch.arange(len(data["counts"]))
    captions = pairs if wrong == "titles" else captions_of(len(pairs), float(wrong))
    captions, is_wrong = captions.to(device), (captions != pairs).to(device)
    changed = {**data, "tokens": data["tokens"][captions], "counts": data["counts"][captions]}
    if wrong == "titles":
        is_wrong[data["titled"]] = True
        changed["tokens"][data["titled"]] = data["titles"][:, None]
        changed["counts"][data["titled"]] = 1
    return changed, captions, is_wrong


def captions_of(pairs: int, share: float) -> Tensor:
    """The pair whose captions each pair has, [pairs]: for this share another one."""
    drawn, captions = torch.Generator().manual_seed(99), torch.arange(pairs)
    wrong = torch.randperm(pairs, generator=drawn)[: int(pairs * share)]
    captions[wrong] = wrong[torch.randperm(len(wrong), generator=drawn)]
    return captions


class FromBatch:
    """A `Teacher` whose embeddings of these sides `InMemory` puts into the batch, of ``width`` or of the student's."""

    options: Mapping[str, Any] = {}
    inputs, words = None, "stored"

    def __init__(self, sides: Sequence[str], width: int | None = None) -> None:
        self._names, self.width = [f"stored_{side}s" for side in sides], width

    def embed(self, inputs: Mapping[str, Any], frozen_outputs: Mapping[str, Any]) -> Features:
        return tuple(inputs[name] for name in self._names)


class TeacherSimilarities(LossTerm):
    """λ times the cross-entropy from a teacher's softmax over the batch to the student's, the mean of both directions.

    This is the distillation of OpenCLIP, for a batch of one process. The student's multiplier is one of its own, which
    is trained.

    Args:
        weight: λ.
        scale: the teacher's multiplier.
    """

    name = "similarities"
    in_order = True

    def __init__(self, weight: float, scale: float, device: torch.device) -> None:
        self._weight, self._scale = weight, scale
        self._log_scale = nn.Parameter(torch.tensor(1 / 0.07, device=device).log())  # as CLIP's begins

    def parameters(self) -> list[nn.Parameter]:
        return [self._log_scale]

    def reference(self, inputs: Mapping[str, Tensor], frozen_outputs: Mapping[str, object]) -> Features:
        return inputs["stored_images"], inputs["stored_texts"]

    def value(self, features: Features, references: Features) -> Tensor:
        images, texts = (one.float() for one in features)
        logits = self._log_scale.clamp(max=math.log(100)).exp() * images @ texts.T
        wanted = self._scale * references[0].float() @ references[1].float().T
        ways = [F.cross_entropy(a, b.softmax(1)) for a, b in ((logits, wanted), (logits.T, wanted.T))]
        return self._weight * torch.stack(ways).mean()


def _term(job: Mapping[str, Any], data: dict[str, Any], folder: Path, width: int) -> LossTerm:
    """The term of a teacher whose embeddings are in ``data``, for a student of so many dimensions."""
    if job["teacher"] == "similarities":
        log_scale = torch.load(folder / f"model {job['taught_by']}.pt", weights_only=True)["logit_scale"]
        return TeacherSimilarities(job["weight"], log_scale.exp().item(), data["images"].device)
    sides = SIDES if job["side"] == "both" else [job["side"]]
    if job["teacher"] == "stored":
        return TeacherDistance(FromBatch(sides), job["weight"], sides)
    wider = 3 * width // 2
    axes = torch.linalg.qr(torch.randn(wider, width, generator=torch.Generator().manual_seed(0)))[0]
    data["stored"] = tuple(one @ axes.T.to(one.device) for one in data["stored"])
    on = {"seed": job["seed"], "device": data["images"].device}
    return TeacherDistance(FromBatch(sides, wider), job["weight"], sides, width=width, **on)


@torch.no_grad()
def stored(teacher: Any, data: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A teacher's normalised embeddings of the images, [N, D], and of all captions, [N, C, D]."""
    dual, device = DualEncoder(teacher.eval()), data["images"].device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        images = [dual.encode_images({"pixel_values": normalised(part)}) for part in data["images"].split(1024)]
        texts = [dual.encode_texts({"input_ids": t.long()}) for t in data["tokens"].flatten(0, 1).split(4096)]
    return torch.cat(images).float(), torch.cat(texts).float().unflatten(0, data["tokens"].shape[:2])


@torch.no_grad()
def at_width(model: Any, data: dict[str, Any], width: int) -> dict[str, float]:
    """Recalls of the embeddings' first dimensions."""
    dual, found = DualEncoder(model.eval(), width), {}
    for name, k in (("vendor", 1), ("concepts", 5)):
        values = data["sets"][name]
        with torch.compiler.set_stance("force_eager"), torch.autocast(data["images"].device.type, torch.bfloat16):
            images = [dual.encode_images({"pixel_values": normalised(part)}) for part in values["images"].split(1024)]
            texts = [dual.encode_texts({"input_ids": part.long()}) for part in values["tokens"].split(1024)]
        metrics = retrieval_metrics(
            F.normalize(torch.cat(images).float(), dim=1),
            F.normalize(torch.cat(texts).float(), dim=1),
            torch.arange(sum(map(len, images)), device=data["images"].device),
        )
        recalls = [metrics[f"{way}_retrieval_recall@{k}"] for way in ("image", "text")]
        found[f"{name}_recall@{k}_of_{width}"] = round(100 * sum(recalls) / 2, 2)
    return found


def _called_wrong(scores: Tensor, probability: float) -> Tensor:
    """Which pairs `infcl score` calls wrong with at least this probability, [n] bool, by their scores [n]."""
    return torch.from_numpy(probability_wrong(scores.cpu().numpy()) >= probability).to(scores.device)


def _scores_of_base(data: dict[str, Any], rows: Tensor, folder: Path) -> Tensor:
    """The scores [n] of these pairs, as `infcl score` gives them, by the model at the start of a fine-tuning."""
    base = training.new_model(data, 0).to(data["images"].device)
    base.load_state_dict(torch.load(folder / "model emoji.pt", weights_only=True))
    images, texts = (embeddings[rows] for embeddings in stored(base, data))
    exists = torch.arange(texts.shape[1], device=rows.device) < data["counts"][rows, None]
    image, caption = exists.nonzero(as_tuple=True)
    return pair_scores(images, texts[image, caption], image, processes=Processes(alone=True))


class Observed(training.InfCLTrainer):
    """Remembers its step, which has the averages of the pairs."""

    last: Any = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        result = super().train(*args, **kwargs)
        Observed.last = self.window_step
        return result


def run_job(job: dict[str, Any], data: dict[str, Any], folder: Path, *, toy: bool) -> dict[str, Any]:
    tuning, device = job["trained_on"] == "clip art", data["images"].device
    batch, samples = (TUNING_BATCH, TUNING_SAMPLES) if tuning else (job["batch"], int(SAMPLES * job["times"]))
    of_trainer = job["method"] == "Trainer"
    run = training.Run(
        experiment="wrong_and_taught",
        method=job["method"],
        batch=64 if toy else batch,
        micro_batch=32 if toy else 256 if of_trainer else min(batch, MICRO_BATCH),
        samples=640 if toy else samples,
        learning_rate=1e-3 if tuning else job.get("rate", RATES[job["optimizer"]]),
        seed=job["seed"],
        evaluations=1,
        optimizer=job["optimizer"],
        pair_ids=job["pair_ids"],
        captions=job["captions"],
        options=json.dumps(job["options"]),
    )
    changed, captions, is_wrong = with_wrong_captions(data, job["wrong"])
    guests: dict[str, Any] = {}
    emoji, clip_art = fine_tuning.EMOJI, fine_tuning.CLIP_ART
    named = {"all": None, "emoji": emoji, "clip art": clip_art, "all but icons": (*emoji, *clip_art)}
    named |= {"twemoji": ("twemoji",), "all but twemoji": (*(one for one in emoji if one != "twemoji"), *clip_art)}
    sources = named[job["trained_on"]]
    removed = is_wrong if job["oracle"] else torch.zeros_like(is_wrong)
    if job["cleaned"] and tuning:
        rows = torch.tensor([source in clip_art for source in data["sources"]], device=device)
        removed[rows] = _called_wrong(_scores_of_base(changed, rows, folder), job["cleaned"])
    elif job["cleaned"]:
        removed = _called_wrong(torch.load(folder / f"averages {job['wrong']}.pt", weights_only=True), job["cleaned"])
        removed = removed.to(device)
    if removed.any():
        gone = removed.tolist()
        changed["sources"] = ["removed" if bad else name for bad, name in zip(gone, data["sources"], strict=True)]
        sources = sources or sorted(set(data["sources"]))
    if job["teacher"]:
        images, texts = torch.load(folder / f"stored {job['taught_by']}.pt", weights_only=True)
        changed["stored"] = images.to(device).float(), texts.to(device).float()[captions]
        guests["extensions"] = [_term(job, changed, folder, images.shape[1])]
    model = training.new_model(data, job["seed"], toy=toy, size=job["size"])
    if tuning:
        changed["sets"] = fine_tuning.sets_of_clip_art(data["sets"])
        model.load_state_dict(torch.load(folder / "model emoji.pt", weights_only=True))
    elif data["images"].is_cuda:
        training.compile_layers(model, texts=job["captions"] == 1)
    training.TRAINERS["InfCLTrainer"] = Observed
    rows, model = training.train(run, changed, {}, model=model, sources=sources, toy=toy, **guests)
    if name := job.get("save"):
        save([part.half().cpu() for part in stored(model, data)], folder / f"stored {name}.pt")
        save(model.state_dict(), folder / f"model {name}.pt")
    found = {name: value for name, value in job.items() if name in (*PLAIN, "seed")} | {"options": run.options}
    found |= {"rate": run.learning_rate, "seconds": rows[-1]["seconds"], "samples": rows[-1]["samples_seen"]}
    found |= training.recalls(rows[-1])
    if "matryoshka_dims" in job["options"] or job["teacher"]:
        for width in (32, 64, 128):
            found |= at_width(model, changed, width)
    for selection in [] if of_trainer else of_kind(Observed.last.extensions, WithoutNoisyPairs):
        seen = [source in sources if sources else True for source in changed["sources"]]
        of_set = torch.tensor(seen, device=device)
        found |= _of_selection(selection, is_wrong[of_set], data["names"][of_set])
        usual = job["optimizer"] == "muon" and job["times"] == 1 and not job["teacher"]
        if job["seed"] == 0 and not tuning and usual:
            save(selection.averages.state_dict()["averages"][1], folder / f"averages {job['wrong']}.pt")
    if removed.any() and not job["oracle"]:
        found |= {"removed": int(removed.sum()), "wrong_kept": int((is_wrong & ~removed).sum())}
    return found


def _of_selection(selection: WithoutNoisyPairs, is_wrong: Tensor, names: Tensor) -> dict[str, Any]:
    """How well the averages at the end of a training tell the wrong pairs from the others, and which are left out."""
    fast, slow = selection.averages.state_dict()["averages"].to(is_wrong.device)
    found: dict[str, Any] = {"border": selection.border or ""}
    if selection.border is not None:
        left = fast.double() < selection.border * mean_of_trained(fast.double(), selection.border)
        _, place, counts = names.unique(return_inverse=True, return_counts=True)
        chosen = {"right_left_out": left[~is_wrong], "unique_left_out": left[~is_wrong & (counts[place] == 1)]}
        chosen["wrong_among_kept"] = is_wrong[~left]
        found |= {name: round(values.double().mean().item(), 4) for name, values in chosen.items()}
    if is_wrong.any():
        for name, values in (("auc", fast), ("auc_of_ledger", slow)):
            ranks = values.argsort().argsort().double() + 1
            right = (~is_wrong).sum()
            wins = ranks[~is_wrong].sum() - right * (right + 1) / 2
            found[name] = round((wins / (right * is_wrong.sum())).item(), 4)
    return found


def main() -> None:
    every = ["teachers", "base", "wrong", "wrong, as much work", "wrong adamw", "taught", "taught by large", "tuned"]
    others = ["titles", "tuned, scored by the start", "bf16 activations", *of_teachers(), *with_icons()]
    parser = side_by_side.arguments(__doc__, f"of {every}; all of these by default; or of {others}")
    args = parser.parse_args()
    jobs, icons = make_jobs(args.parts or every), any(name in with_icons() for name in args.parts)
    side_by_side.run(jobs, run_job, args, "wrong_and_taught", lambda: prepare(args.corpus, with_icons=icons), needed_by)


if __name__ == "__main__":
    main()
