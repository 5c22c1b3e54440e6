"""Tests of the peers of `bench step`: an expert's step has the plain network's gradients, and what is wrong or missing gets no time."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import samples

from nbcnn.cli import bench
from nbcnn.files.errors import UsageError
from nbcnn.lab.peers import jax_step
from nbcnn.lab.peers import nets as peers
from nbcnn.lab.report import sections
from nbcnn.lab.studies import step as study
from nbcnn.lab.studies.nets import Apart, compared

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is no dependency")


def flags(*words):
    found = bench.parser().parse_args(["step", *words])
    found.peers = bench._peers(found)
    return found


def row(form, ms, **more):
    return {"form": form, "precision": "bf16", "batch": 64, "step_ms": samples.timing(ms), "images_per_second": 1.0, "peak_bytes": 2**20, **more}


def test_several_peers_are_named_together_and_none_alone():
    assert flags("--peer", "torch,torch-expert,jax").peers == ("torch", "torch-expert", "jax")
    assert flags("--peer", "none").peers == ("none",)
    assert flags().peers is None
    with pytest.raises(UsageError, match="none goes with no other peer"):
        flags("--peer", "none,jax")
    other = bench.parser().parse_args(["convs", "--peer", "jax"])
    with pytest.raises(UsageError, match="peers of step alone; this is convs"):
        bench._peers(other)


def test_what_a_user_writes_and_what_an_expert_does_have_columns_of_their_own():
    ours = row("nbcnn tensorcore", 1.0, planned_bytes={"arena": 2**20, "data set": 5})
    user = [row("PyTorch compile", 6.0), row("PyTorch graph", 7.0), row("JAX", 5.0)]
    expert = [row("PyTorch by an expert", 2.0, expert=True), {"form": "JAX by an expert", "batch": 64, "expert": True, "why": "JAX is not installed"}]
    table = sections.beside_peers([ours, *user, *expert])
    assert table.rows == (("64", "**1.000**", "1", "5.000 (JAX)", "**5.00×**", "2.000 (PyTorch)", "**2.00×**", "1 / 1"),)
    alone = sections.beside_peers([ours, *user[:1]]).filled()
    assert alone.head == ("batch", "nbcnn ms", "images/s", "what a user would write, ms", "ours is", sections.MEMORY)
    assert alone.rows[0][3:5] == ("6.000 (torch.compile)", "**6.00×**")
    assert sections.steps([{**ours, "ratio": 1.0}, expert[1]]).rows[1] == ("JAX by an expert", "not timed", "", "", "")


def test_the_table_says_why_a_peer_has_no_time():
    rows = [row("nbcnn cudacore", 2.0), row("PyTorch graph", 3.0), {"form": "JAX", "why": jax_step.MISSING}]
    text = study.lines(rows)
    assert rows[1]["ratio"] == 1.5
    assert text[2].endswith("1.50×")
    assert text[3].split(maxsplit=1) == ["JAX", jax_step.MISSING]


def test_without_jax_its_rows_say_so(monkeypatch):
    monkeypatch.setattr(jax_step, "available", lambda: False)
    problem = study.problem_of(1)
    found = list(jax_step.rows(problem, "bf16", 1e-4, 0.1, lambda loss, gradients: ""))
    assert [(one["form"], one["why"], one.get("expert", False)) for one in found] == [
        ("JAX", jax_step.MISSING, False),
        ("JAX by an expert", jax_step.MISSING, True),
    ]


def test_gradients_further_off_than_pytorchs_allow_are_refused():
    wanted = 1.0, {"w": np.ones(4), "b": np.ones(2)}
    its = 1.0, {"w": np.full(4, 1.01), "b": np.full(2, 1.01)}
    errors = compared((1.0, {"w": np.full(4, 1.015), "b": np.full(2, 1.015)}), its, wanted, 0.0, 0.0)
    assert errors == {"gradient_error": pytest.approx(0.015), "peer_error": pytest.approx(0.01)}
    with pytest.raises(Apart, match="gradient of b"):
        compared((1.0, {"w": np.ones(4), "b": np.full(2, 1.1)}), its, wanted, 0.0, 0.0)
    with pytest.raises(Apart, match="loss of the first step"):
        compared((1.1, wanted[1]), its, wanted, 0.0, 0.0)


@needs_torch
@pytest.mark.parametrize("way", [0, 1])
def test_the_experts_step_has_the_plain_networks_gradients(way):
    """In float64, where the folded algebra leaves rounding alone: 4·(ε·√terms) of each of nine products, ε of float64."""
    from nbcnn.lab.peers import nets, torch_expert

    problem = study.problem_of(1)
    loss, wanted = nets.gradients(problem, "fp64", "cpu")
    made = torch_expert.Expert(problem, "fp64", 1e-4, "cpu", {name: ways[way] for name, ways in torch_expert.WAYS.items()})
    found_loss, found = made.first()
    bound = len(study.TERMS) * 4 * 2.0**-52 * max(study.TERMS) ** 0.5
    assert found_loss == pytest.approx(loss, rel=bound)
    assert set(found) == set(wanted)
    for name, gradient in wanted.items():
        assert np.linalg.norm(found[name] - gradient) <= bound * np.linalg.norm(gradient), name


@needs_torch
def test_products_of_two_tf32_parts_are_float32s():
    """Rounding to tf32 leaves 2⁻¹¹ of each operand, which the low parts hold to 2⁻¹¹ again: the products are 2⁻²² apart, and float32 adds its own."""
    import torch

    from nbcnn.lab.peers.torch_expert import Arithmetic

    a, b = (torch.from_numpy(np.random.default_rng(seed).standard_normal((33, 33)).astype(np.float32)) for seed in (0, 1))
    got, want = Arithmetic("fp32").product(a, b).double(), a.double() @ b.double()
    bound = 4 * (2.0**-22 + 2.0**-23 * 99**0.5)
    assert float((got - want).norm() / want.norm()) <= bound
    assert float((Arithmetic("bf16").product(a, b).double() - want).norm() / want.norm()) > bound


@needs_torch
@pytest.mark.skipif(not jax_step.available(), reason="JAX is no dependency")
def test_jax_has_the_plain_networks_gradients_and_a_refused_one_no_time():
    problem = study.problem_of(1)
    check = study.Check(problem, "fp32", "cpu")
    assert all("step_ms" in found for found in jax_step.rows(problem, "fp32", 1e-4, 0.01, check.words))
    refused = list(jax_step.rows(problem, "fp32", 1e-4, 0.01, lambda loss, gradients: "not timed: apart", ("folded",)))
    assert [found["why"] for found in refused] == ["not timed: apart"]


def test_step_and_nets_time_the_same_forms_in_one_harness(monkeypatch):
    """Of each form one row; torch.compile's is compiled once for itself and for its CUDA graph, and what other forms hold is freed before."""
    done, memory = [], iter(range(10))
    fake = SimpleNamespace(compiler=SimpleNamespace(reset=lambda: None), cuda=SimpleNamespace(memory_allocated=lambda: next(memory)))
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(peers, "release", lambda: done.append("release"))
    monkeypatch.setattr(peers, "_step", lambda problem, precision, form, rate: done.append(f"step of {peers.MODES.get(form)}") or form)
    monkeypatch.setattr(peers, "captured", lambda step: ("captured", step))
    monkeypatch.setattr(peers, "settled", lambda step: ("settled", step))

    def timed(call, seconds):
        done.append(call)
        if call == ("settled", "compile"):
            raise RuntimeError("no Triton")
        return SimpleNamespace(median=2.0)

    monkeypatch.setattr(peers, "_time", timed)
    monkeypatch.setattr(peers, "_row", lambda form, timing, batch, before: row(form, timing.median, batch=batch, before=before))
    rows = list(study.beside(2, "bf16", ("torch",), peers.FORMS, 0.1))
    assert [one["form"] for one in rows] == [f"PyTorch {form}" for form in peers.FORMS]
    assert [one.get("why") for one in rows] == [None, None, "RuntimeError: no Triton", None, None]
    assert [one.get("before") for one in rows] == [0, 0, None, 1, 2]
    assert done == [
        *("release", "step of None", ("settled", "eager"), ("captured", "eager")),
        *("release", "step of default", ("settled", "compile"), ("captured", "compile")),
        *("release", "step of max-autotune-no-cudagraphs", ("captured", "compile-max")),
    ]
    assert bench.FORMS == peers.FORMS
    assert set(peers.FORMS) == set(sections.FORMS)


def test_a_compiled_step_in_a_graph_counts_as_what_a_user_would_write():
    ours = row("nbcnn tensorcore", 1.0, planned_bytes={"arena": 2**20, "data set": 5})
    table = sections.beside_peers([ours, row("PyTorch compile", 6.0), row("PyTorch compile-graph", 3.5)]).filled()
    assert table.rows[0][3:5] == ("3.500 (torch.compile in a CUDA graph)", "**3.50×**")
