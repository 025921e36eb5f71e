"""Muon and AdamW in one optimizer: equal to torch's, on one process and on several; which parameters each updates."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import models
from helpers.processes import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hf_infcl.models.dual_encoder import DualEncoder
from hf_infcl.optim import MuonAdamW, parameter_groups
from hf_infcl.optim.groups import roles, table_of_groups
from hf_infcl.processes.collectives import Processes

# Rows, columns: a row, a column, two rows, wide, tall, square, and several of one shape.
SHAPES = [(1, 9), (9, 1), (2, 33), (16, 24), (24, 16), (17, 17), (24, 16), (16, 24), (5, 64), (24, 16)]


def matrices(shapes: Any = SHAPES, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    # As small as weights are, so that the steps are not below the last bit of a weight in bf16.
    return [nn.Parameter(0.02 * torch.randn(shape, generator=g).to(dtype)) for shape in shapes]


def set_gradients(parameters: list[Any], step: int) -> None:
    """Gradients that depend on the step and the parameter's number alone; sharded as the parameters are."""
    for n, p in enumerate(parameters):
        g = torch.Generator().manual_seed(100 * step + n)
        gradient = torch.randn(p.shape, generator=g).to(p.dtype)
        p.grad = distribute_tensor(gradient, p.device_mesh, p.placements) if isinstance(p, DTensor) else gradient


def train(optimizer: torch.optim.Optimizer, parameters: list[Any], steps: int = 3, first: int = 0) -> list[Tensor]:
    for step in range(first, first + steps):
        set_gradients(parameters, step)
        optimizer.step()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in parameters]


def muon(parameters: Any, **options: Any) -> MuonAdamW:
    return MuonAdamW([{"params": parameters, "algorithm": "muon"}], lr=0.02, **options)


def torch_muon(parameters: Any) -> torch.optim.Muon:
    return torch.optim.Muon(parameters, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")


def assert_equal_updates(found: list[Tensor], expected: list[Tensor], start: list[Any], bound: float) -> None:
    for now, then, before in zip(found, expected, start, strict=True):
        assert now.dtype == then.dtype
        difference = (now.float() - then.float()).norm() / (then.float() - before.detach().float()).norm()
        assert difference <= bound, (tuple(now.shape), difference)


# ---- Equal to torch's optimizers ----


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 0.02), (torch.bfloat16, 0.1)], ids=["fp32", "bf16"])
def test_matrices_are_updated_as_by_torch_muon(dtype, bound):
    """The iteration in bf16 magnifies the last bit of its input to 1% of an update; weights in bf16 are rounded."""
    ours, theirs = matrices(dtype=dtype), matrices(dtype=dtype)
    found, expected = train(muon(ours), ours), train(torch_muon(theirs), theirs)
    assert_equal_updates(found, expected, matrices(dtype=dtype), bound)


def test_matrices_that_are_not_contiguous_are_updated_alike():
    ours, theirs = ([nn.Parameter(p.detach().t().contiguous().t()) for p in matrices()] for _ in range(2))
    assert not ours[3].is_contiguous()
    assert_equal_updates(train(muon(ours), ours), train(torch_muon(theirs), theirs), matrices(), bound=0.02)


def test_stacks_are_divided_where_they_would_take_too_much_memory(monkeypatch):
    whole, pieces = matrices(), matrices()
    expected = train(muon(whole), whole)
    monkeypatch.setattr("hf_infcl.optim.muon.MOST_VALUES", 24 * 16 * 2)
    assert_equal_updates(train(muon(pieces), pieces), expected, matrices(), bound=0.02)


@pytest.mark.parametrize("fused", [False, True])
def test_the_rest_is_updated_as_by_torch_adamw(fused):
    shapes = [(7,), (), (3, 4, 2), (16, 24)]
    options = {"lr": 0.01, "betas": (0.9, 0.98), "eps": 1e-6, "fused": fused}
    groups = [{"params": matrices(shapes)[:2], "weight_decay": 0.0}, {"params": matrices(shapes)[2:]}]
    both = copy.deepcopy(groups)
    others = matrices()
    ours = MuonAdamW([*groups, {"params": others, "algorithm": "muon", "lr": 0.02}], weight_decay=0.3, **options)
    theirs = torch.optim.AdamW(both, weight_decay=0.3, **options)
    found = train(ours, [*groups[0]["params"], *groups[1]["params"]])
    expected = train(theirs, [*both[0]["params"], *both[1]["params"]])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.equal(found[2], matrices(shapes)[2])
    assert all(torch.equal(p, q) for p, q in zip(others, matrices(), strict=True)), "they have no gradient"


def test_the_parts_of_a_fused_weight_are_orthogonalised_by_themselves():
    """The gradient of the values is usually larger, and as one matrix they would get nearly all of the update."""
    fused = matrices([(48, 16), (48, 16)])
    parts = [nn.Parameter(part.clone()) for p in fused for part in p.detach().chunk(3)]
    start = [p.detach().clone() for p in fused]
    ours = MuonAdamW([{"params": fused, "algorithm": "muon", "parts": 3}], lr=0.02)
    theirs = torch_muon(parts)
    for step in range(2):
        set_gradients(fused, step)
        for p in fused:
            p.grad[32:] *= 100
        for part, gradient in zip(parts, (g for p in fused for g in p.grad.chunk(3)), strict=True):
            part.grad = gradient.clone()
        ours.step()
        theirs.step()
    expected = [torch.cat(list(parts[n : n + 3])).detach() for n in (0, 3)]
    assert_equal_updates(fused, expected, start, bound=0.02)


def test_schedules_closures_and_clipping():
    ours, theirs = matrices(), matrices()
    first, second = muon(ours), torch_muon(theirs)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in (first, second)]
    for step in range(3):
        for parameters in (ours, theirs):
            set_gradients(parameters, step)
            nn.utils.clip_grad_norm_(parameters, 1.0)
        assert first.step(lambda: torch.tensor(3.0)) == 3
        second.step()
        for schedule in schedules:
            schedule.step()
    assert first.param_groups[0]["lr"] == second.param_groups[0]["lr"] < 0.02
    assert_equal_updates(ours, theirs, matrices(), bound=0.02)


def test_a_scaler_leaves_out_steps_that_overflow():
    parameters, vector = matrices([(4, 6)]), nn.Parameter(torch.ones(3))
    groups = [{"params": [vector], "fused": True}, {"params": parameters, "algorithm": "muon"}]
    optimizer, scaler = MuonAdamW(groups), torch.amp.GradScaler("cpu", init_scale=1024)
    start = [p.detach().clone() for p in (*parameters, vector)]
    for overflow in (True, False):
        scaler.scale(sum((p * p).sum() for p in (*parameters, vector))).backward()
        if overflow:
            vector.grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        changed = [not torch.equal(p, before) for p, before in zip((*parameters, vector), start, strict=True)]
        assert changed == [not overflow] * 2
        optimizer.zero_grad()
    torch.testing.assert_close(vector.detach(), 0.9999 * torch.ones(3) - 1e-3)  # the gradient was unscaled once
    assert scaler.get_scale() == 512


def test_a_saved_state_goes_on_to_the_bit(tmp_path):
    def build(seed: int) -> tuple[MuonAdamW, list[Any]]:
        parameters = matrices([*SHAPES, (7,)], seed=seed)
        return MuonAdamW([{"params": parameters[-1:]}, {"params": parameters[:-1], "algorithm": "muon"}]), parameters

    optimizer, parameters = build(0)
    weights = train(optimizer, parameters, steps=2)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    expected = train(optimizer, parameters, steps=2, first=2)
    resumed, others = build(1)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    with torch.no_grad():
        for other, weight in zip(others, weights, strict=True):
            other.copy_(weight)
    found = train(resumed, others, steps=2, first=2)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# ---- Several processes ----


def rank_shared(rank: int, world_size: int, state: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
    parameters = matrices()
    optimizer = muon(parameters, processes=Processes())
    optimizer.load_state_dict(copy.deepcopy(state))  # processes receive the memory of the tensors, not copies
    weights = train(optimizer, parameters, first=1)
    return weights, optimizer.state_dict()


def test_processes_share_the_matrices_and_load_the_state_of_one_process(ranks):
    before = matrices()
    first = muon(before)
    train(first, before, steps=1)
    state = first.state_dict()
    parameters = matrices()
    one = muon(parameters)
    one.load_state_dict(copy.deepcopy(state))  # the tensors that are loaded become its own
    expected = train(one, parameters, first=1)
    for world_size in (1, 2, 3):
        for weights, after in ranks.run(rank_shared, world_size, state):
            assert_equal_updates(weights, expected, matrices(), bound=0.02)
            averages = [s["momentum_buffer"] for s in after["state"].values()]
            assert all(torch.equal(a, s["momentum_buffer"]) for a, s in zip(averages, one.state.values(), strict=True))


@on_ranks(3)
def test_processes_that_share_matrices_keep_equal_weights(rank, world_size):
    parameters = matrices()
    weights = torch.cat([w.flatten() for w in train(muon(parameters, processes=Processes()), parameters)])
    others = [torch.empty_like(weights) for _ in range(world_size)]
    dist.all_gather(others, weights)
    assert all(torch.equal(weights, other) for other in others), "processes must not drift apart"


def rank_sharded(rank: int, world_size: int, replicas: int) -> list[Tensor]:
    sizes, names = (world_size // replicas,), ("shard",)
    placements: list[Any] = [Shard(0)]
    if replicas > 1:
        sizes, names, placements = (replicas, *sizes), ("replicate", *names), [Replicate(), *placements]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    parameters = [nn.Parameter(distribute_tensor(p.detach(), mesh, placements)) for p in matrices([*SHAPES, (12, 4)])]
    groups = [{"params": parameters[:-1]}, {"params": parameters[-1:], "parts": 3}]
    return train(MuonAdamW([{"algorithm": "muon", **group} for group in groups], lr=0.02), parameters)


@pytest.mark.parametrize(("world_size", "replicas"), [(2, 1), (3, 1), (2, 2)], ids=["2", "3", "replicas"])
def test_sharded_matrices_are_orthogonalised_as_a_whole(fresh_ranks, world_size, replicas):
    start = matrices([*SHAPES, (12, 4)])
    parameters = matrices([*SHAPES, (12, 4)])
    groups = [{"params": parameters[:-1]}, {"params": parameters[-1:], "parts": 3}]
    expected = train(MuonAdamW([{"algorithm": "muon", **group} for group in groups], lr=0.02), parameters)
    for weights in fresh_ranks.run(rank_sharded, world_size, replicas):
        assert_equal_updates(weights, expected, start, bound=0.02)


@on_ranks(2, fresh=True)
def test_columns_that_are_divided_are_refused(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    parameters = [nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)]))]
    with pytest.raises(ValueError, match="whose rows are divided among processes in one way"):
        train(muon(parameters), parameters)


# ---- Which parameters ----

# The matrices that Muon updates, the fused ones among them, and the parameters with two or more dimensions of AdamW.
COUNTS = {
    "aimv2": (19, 0, 5),
    "align": (7, 0, 8),
    "altclip": (15, 0, 5),
    "blip": (13, 1, 5),
    "chinese_clip": (14, 0, 5),
    "clip": (14, 0, 4),
    "clipseg": (14, 0, 4),
    "groupvit": (36, 0, 5),
    "metaclip_2": (14, 0, 4),
    "owlv2": (14, 0, 4),
    "owlvit": (14, 0, 4),
    "siglip": (17, 1, 5),
    "siglip2": (17, 1, 5),
    "tipsv2": (12, 0, 5),
    "vision-text-dual-encoder": (15, 0, 5),
}


def test_all_types_of_models_are_counted():
    assert set(COUNTS) == {*models.BUILD, "tipsv2"}


@pytest.mark.parametrize("kind", models.BUILD)
def test_roles_of_the_parameters(kind):
    model = models.BUILD[kind]()
    DualEncoder(model).freeze(None)
    found = roles(model)
    parameters = dict(model.named_parameters())
    muon = {name for name, role in found.items() if role in ("matrices of layers", "fused query, key and value")}
    rest = [name for name in found if name not in muon and parameters[name].ndim > 1]
    fused = [p for group in groups_of(model) if group.get("parts") == 3 for p in group["params"]]
    assert (len(muon), len(fused), len(rest)) == COUNTS[kind]
    assert all(parameters[name].ndim == 2 for name in muon)
    assert not [name for name in muon if any(word in name for word in ("embed", "norm", "bias", "token", "conv"))]
    assert not [name for name in rest if name.startswith(("text_projection", "visual_projection"))]


def groups_of(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    decaying = {name for name, p in model.named_parameters() if p.ndim > 1}
    rates = {"learning_rate": 1e-3, "muon_learning_rate": 4e-3, "weight_decay": 0.1}
    return parameter_groups(model, **rates, decaying=decaying, **options)


def test_the_groups_and_their_table():
    groups = groups_of(models.siglip())
    assert [(g["algorithm"], g["name"], g["lr"], g["weight_decay"], g.get("parts")) for g in groups] == [
        ("adamw", "vectors and scalars", 1e-3, 0.0, None),
        ("adamw", "embeddings and convolutions", 1e-3, 0.1, None),
        ("muon", "matrices of layers", 4e-3, 0.1, 1),
        ("muon", "fused query, key and value", 4e-3, 0.1, 3),
    ]
    lines = table_of_groups(MuonAdamW(groups).param_groups).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [line.split() for line in lines[3:]] == [
        ["matrices", "of", "layers", "Muon", "16", "5,632", "0.004", "0.1"],
        ["fused", "query,", "key", "and", "value", "Muon", "1", "768", "0.004", "0.1"],
    ]
    every = [p for group in groups for p in group["params"]]
    assert len(every) == len(set(every)) == len(list(models.siglip().parameters()))


def test_a_table_that_a_layer_shares_stays_one():
    parts = {"head": nn.Linear(8, 20, bias=False), "table": nn.Embedding(20, 8), "layer": nn.Linear(8, 8)}
    model = nn.ModuleDict(parts)
    model["head"].weight = model["table"].weight
    assert roles(model) == {
        "head.weight": "embeddings and convolutions",
        "layer.weight": "matrices of layers",
        "layer.bias": "vectors and scalars",
    }


def test_frozen_parameters_belong_to_no_group():
    model = models.clip()
    model.vision_model.requires_grad_(False)
    assert sum(len(g["params"]) for g in groups_of(model) if g["algorithm"] == "muon") == 8


def test_patterns_move_parameters():
    model = models.clip()
    names = {id(p): name for name, p in model.named_parameters()}
    groups = groups_of(model, to_muon=["token_embedding"], to_adamw=[r"_projection\.weight"])
    moved = {names[id(p)]: g["algorithm"] for g in groups for p in g["params"]}
    assert moved["text_model.embeddings.token_embedding.weight"] == "muon"
    assert moved["visual_projection.weight"] == moved["text_projection.weight"] == "adamw"
    assert sum(algorithm == "muon" for algorithm in moved.values()) == 13


def test_adapters_are_left_to_adamw_unless_a_pattern_moves_them():
    peft = pytest.importorskip("peft")
    config = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["visual_projection"]}
    model = peft.get_peft_model(models.clip(), peft.LoraConfig(**config))
    assert sorted(roles(model).values()) == ["adapters"] * 4 + ["matrices of layers"]
    moved = groups_of(model, to_muon=["lora_"])
    assert {g["name"]: (g["algorithm"], len(g["params"])) for g in moved} == {
        "adapters": ("muon", 4),
        "matrices of layers": ("muon", 1),
    }
    only = peft.get_peft_model(models.clip(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"Muon would update nothing.*unless muon_parameters names them \('lora_'\)"):
        groups_of(only)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to_muon": ["nowhere"]}, "'nowhere', for muon, is found in the name of no trained parameter"),
        ({"to_adamw": ["("]}, r"'\(' is not a regular expression"),
        ({"to_muon": ["patch_embedding"]}, r"patch_embedding.weight has the shape \(16, 3, 8, 8\), but Muon updates"),
        ({"to_muon": ["q_proj.weight"], "to_adamw": ["q_proj"]}, "q_proj.weight is to be updated by Muon and by AdamW"),
        ({"to_adamw": ["weight"]}, "Muon would update nothing.*Train it with AdamW"),
    ],
    ids=["unknown", "no-expression", "convolution", "both", "nothing"],
)
def test_patterns_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        groups_of(models.clip(), **options)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"params": [nn.Parameter(torch.ones(3))]}, r"parameters of shape \(3,\)"),
        ({"parts": 2}, r"2 matrices with as many rows each, but got parameters of shape \(1, 9\)"),
        ({"momentum": 1.0}, "momentum must be at least 0 and less than 1, got 1.0"),
        ({"ns_steps": 0}, "ns_steps must be an integer of at least 1, got 0"),
        ({"algorithm": "sgd"}, "must be 'adamw' or 'muon', got 'sgd'"),
    ],
    ids=["vector", "parts", "momentum", "steps", "algorithm"],
)
def test_groups_that_cannot_be_are_refused(group, message):
    optimizer = muon(matrices())
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": matrices(), "algorithm": "muon", **group})
    assert len(optimizer.param_groups) == 1
