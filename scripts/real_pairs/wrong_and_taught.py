"""Wrong captions and teachers: how the data change, and how well a training tells right pairs from wrong ones."""

from typing import Any

import torch
from torch import Tensor

from hf_infcl.loss.pair_scores import pair_scores
from hf_infcl.models.dual_encoder import DualEncoder
from hf_infcl.processes.collectives import Processes
from hf_infcl.quality.ledger import probability_wrong
from hf_infcl.quality.selection import WithoutNoisyPairs, mean_of_trained

from .training import encoded


def with_wrong_captions(data: dict[str, Any], wrong: str) -> tuple[dict[str, Any], Tensor, Tensor]:
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
    """The pair whose captions each pair has, [pairs]: for this share another one, the same ones in all runs."""
    drawn, captions = torch.Generator().manual_seed(99), torch.arange(pairs)
    wrong = torch.randperm(pairs, generator=drawn)[: int(pairs * share)]
    captions[wrong] = wrong[torch.randperm(len(wrong), generator=drawn)]
    return captions


@torch.no_grad()
def stored(model: Any, data: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A model's normalised embeddings of the images, [N, D], and of all captions, [N, C, D]."""
    dual, tokens = DualEncoder(model.eval()), data["tokens"]
    return encoded(dual, data["images"]), encoded(dual, tokens.flatten(0, 1), 4096).unflatten(0, tokens.shape[:2])


def called_wrong(scores: Tensor, probability: float) -> Tensor:
    """Which pairs `infcl score` calls wrong with at least this probability, [n] bool, by their scores [n]."""
    return torch.from_numpy(probability_wrong(scores.cpu().numpy()) >= probability).to(scores.device)


def scores_of(model: Any, data: dict[str, Any], rows: Tensor) -> Tensor:
    """The scores [n] of these pairs, as `infcl score` gives them."""
    images, texts = (embeddings[rows] for embeddings in stored(model, data))
    exists = torch.arange(texts.shape[1], device=rows.device) < data["counts"][rows, None]
    image, caption = exists.nonzero(as_tuple=True)
    return pair_scores(images, texts[image, caption], image, processes=Processes(alone=True))


def of_selection(selection: WithoutNoisyPairs, is_wrong: Tensor) -> dict[str, Any]:
    """How well the averages at the end of a training tell the wrong pairs from the others, and which are left out.

    ``auc`` and ``auc_of_ledger`` are those of the averages of the rule and of the ledger, ``border`` is what the rule
    has chosen, ``right_left_out`` the share of the right pairs that it then leaves out, and ``wrong_among_kept`` of the
    wrong ones among the others.
    """
    fast, slow = selection.averages.state_dict()["averages"].to(is_wrong.device)
    found: dict[str, Any] = {"border": selection.border or ""}
    if selection.border is not None:
        left = fast.double() < selection.border * mean_of_trained(fast.double(), selection.border)
        chosen = {"right_left_out": left[~is_wrong], "wrong_among_kept": is_wrong[~left]}
        found |= {name: round(values.double().mean().item(), 4) for name, values in chosen.items()}
    if is_wrong.any():
        for name, values in (("auc", fast), ("auc_of_ledger", slow)):
            ranks = values.argsort().argsort().double() + 1
            right = (~is_wrong).sum()
            wins = ranks[~is_wrong].sum() - right * (right + 1) / 2
            found[name] = round((wins / (right * is_wrong.sum())).item(), 4)
    return found
