"""Lowered steps: the same values as the traced ones, in a few products with weights that are packed once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tests import toy
from yggc.export import (
    StepModule,
    allocate_kv,
    constants,
    draft_pass,
    example_inputs,
    export_step,
    fused_draft,
    nest_inputs,
    verify_step,
)
from yggc.kernels import OPERATORS
from yggc.lowering import lower_to_kernels
from yggc.packing import BLOCK, AffineWeights, Format, PackedMatrix, unpack
from yggrt.artifacts import MASK_VALUE, ROWS_PREFIX
from yggrt.plan import identity_table
from yggrt.tree import TreeShape

ATEN = torch.ops.aten
NUM_LAYERS = 2
SHAPE = TreeShape(3, 2, 4)
LIMITS = toy.make_limits(SHAPE, max_context=60)
KEPT = tuple(range(3, 64, 4))

SIZES = {
    "vocab_size": toy.VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.35, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def make_qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))


def make_gpt2() -> PreTrainedModel:
    sizes = {"n_embd": 32, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 128, "initializer_range": 0.35}
    return GPT2LMHeadModel(GPT2Config(vocab_size=toy.VOCAB_SIZE, bos_token_id=1, eos_token_id=2, **sizes))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: toy.make_llama(0),
    "tied llama": lambda: toy.make_llama(1, tie_word_embeddings=True),
    "qwen2": make_qwen2,
    "gpt2": make_gpt2,
}


@dataclass(frozen=True, slots=True)
class Lowered:
    """A step as it was traced, and the program that it was lowered to."""

    step: StepModule
    program: ExportedProgram

    def calls(self, *targets: object) -> list[fx.Node]:
        return [node for node in self.program.graph_module.graph.nodes if node.target in targets]

    def target(self, node: object) -> str:
        """Name of the constant that a node stands for."""
        names = {spec.arg.name: spec.target for spec in self.program.graph_signature.input_specs}
        return names[node.name]

    def is_parameter(self, node: fx.Node) -> bool:
        """Whether a node is a weight of the model, as it is or reshaped; rotary frequencies are none."""
        while node.op == "call_function" and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        kinds = {spec.arg.name: spec.kind for spec in self.program.graph_signature.input_specs}
        return kinds.get(node.name) is InputKind.PARAMETER

    def matrix(self, product: fx.Node) -> Tensor:
        """The weights of a product, unpacked."""
        inputs, weights, columns, kind = product.args
        data = self.program.state_dict[self.target(weights)]
        return unpack(PackedMatrix(data, columns, inputs.meta["val"].shape[-1], Format(kind)))


def lower(step: StepModule, affine: dict[str, AffineWeights] | None = None) -> Lowered:
    return Lowered(step, lower_to_kernels(export_step(step), affine or {}))


@cache
def lowered_verify(family: str) -> Lowered:
    torch.manual_seed(3)
    model = FAMILIES[family]().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return lower(verify_step(model, toy.VOCAB_SIZE, LIMITS))


def verify_arguments(step: StepModule, width: int, extent: int) -> list[Tensor]:
    """Rows at random slots that see random slots; KV rows are moved to others."""
    flat = example_inputs(step, {"W": width, "S": extent})
    places = 1 + torch.randperm(extent - 1)
    for spec, tensor in zip(step.inputs, flat, strict=True):
        if spec.name == "tokens":
            tensor.random_(0, toy.VOCAB_SIZE)
        elif spec.name == "positions":
            tensor.copy_(torch.arange(3, 3 + width))
        elif spec.name == "slots":
            tensor.copy_(places[:width])
        elif spec.name.startswith("mask."):
            tensor.copy_(torch.where(torch.rand(width, extent) < 0.4, 0.0, MASK_VALUE))
            tensor[:, 0] = 0
        elif spec.name == "move_src":
            tensor.random_(0, extent)
        elif spec.name == "move_dst":
            tensor.copy_(places[width : width + LIMITS.max_moves])
    return flat


def run_both(lowered: Lowered, flat: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of the traced module and of the lowered program, each with its KV buffers after the step."""
    kept = [torch.randn_like(buffer) for buffer in allocate_kv(lowered.step)]
    results = []
    for run in (lowered.step.module, lowered.program.module()):
        buffers = copy.deepcopy(kept)
        with torch.no_grad():
            outputs = run(*nest_inputs(lowered.step, [tensor.clone() for tensor in flat], buffers))
        assert not any(torch.equal(*pair) for pair in zip(buffers, kept, strict=True))
        results.append([*outputs, *buffers])
    return results[0], results[1]


def assert_close(found: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float) -> None:
    for left, right in zip(found, expected, strict=True):
        scale = max(1.0, float(right[right.isfinite()].abs().max())) if right.is_floating_point() else 0.0
        torch.testing.assert_close(left, right, rtol=0, atol=tolerance * scale)


# Values


@pytest.mark.field(21, 24)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_lowered_step_computes_the_traced_values_at_widths_never_traced(family):
    torch.manual_seed(4)
    lowered = lowered_verify(family)
    for width, extent in ((1, 20), (2, 3 + LIMITS.max_moves), (9, 33), (17, LIMITS.kv_rows - 1)):
        expected, found = run_both(lowered, verify_arguments(lowered.step, width, extent))
        assert found[3].shape == (width, toy.VOCAB_SIZE)
        assert_close(found, expected, 1e-5)


def test_a_bfloat16_model_stays_one():
    torch.manual_seed(5)
    model = toy.make_llama(2, num_hidden_layers=1).bfloat16()
    lowered = lower(verify_step(model, toy.VOCAB_SIZE, LIMITS))
    assert {node.args[3] for node in lowered.calls(OPERATORS.linear, OPERATORS.embedding)} == {Format.BFLOAT16}
    expected, found = run_both(lowered, verify_arguments(lowered.step, 5, 21))
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in expected]
    assert_close(found[2:], expected[2:], 0.03)  # what an argmax says among near ties is left out


# The graph


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_reads_an_unpacked_matrix(family):
    lowered = lowered_verify(family)
    untouched = (ATEN.linear, ATEN.addmm, ATEN.mm, ATEN.matmul, ATEN.embedding, ATEN.scaled_dot_product_attention)
    left = lowered.calls(*(packet.default for packet in untouched))
    assert [call for call in left if any(lowered.is_parameter(operand) for operand in call.all_input_nodes)] == []
    assert len(lowered.calls(OPERATORS.linear)) == 4 * NUM_LAYERS + 1  # q k v, o, gate and up, down; the head
    assert len(lowered.calls(OPERATORS.attention)) == NUM_LAYERS
    assert len(lowered.calls(OPERATORS.embedding)) == (2 if family == "gpt2" else 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_that_nobody_reads_any_more_are_gone(family):
    lowered = lowered_verify(family)
    program = lowered.program
    parameters = dict(lowered.step.module.named_parameters())
    for name, value in program.state_dict.items():
        assert value.dtype == torch.uint8 or (value.ndim == 1 and name in parameters)
    assert set(program.state_dict) >= {name for name, value in parameters.items() if value.ndim == 1}
    placeholders = {node.name: node for node in program.graph_module.graph.nodes if node.op == "placeholder"}
    specs = program.graph_signature.input_specs
    assert list(placeholders) == [spec.arg.name for spec in specs]
    read = {spec.target for spec in specs if spec.target is not None and placeholders[spec.arg.name].users}
    assert read >= set(program.state_dict)


@pytest.mark.field(22)
@pytest.mark.parametrize("family, num_packed", [("llama", 4 * NUM_LAYERS + 2), ("tied llama", 4 * NUM_LAYERS + 1)])
def test_a_tied_embedding_is_packed_once_and_another_on_its_own(family, num_packed):
    lowered = lowered_verify(family)
    packed = [name for name, value in lowered.program.state_dict.items() if value.dtype == torch.uint8]
    assert len(packed) == num_packed
    (table,) = lowered.calls(OPERATORS.embedding)
    heads = [node for node in lowered.calls(OPERATORS.linear) if node.args[1] is table.args[1]]
    assert len(heads) == (1 if family == "tied llama" else 0)
    assert lowered.target(table.args[1]).startswith(ROWS_PREFIX) == (family == "llama")


def test_only_what_is_read_in_rows_is_named_so():
    for family, num_tables in (("llama", 1), ("tied llama", 0), ("qwen2", 1), ("gpt2", 1)):
        names = lowered_verify(family).program.state_dict
        assert sum(name.startswith(ROWS_PREFIX) for name in names) == num_tables


def test_linears_with_one_input_lie_below_one_another_in_the_order_of_the_graph():
    lowered = lowered_verify("llama")
    layer = lowered.step.module.model.model.layers[0]
    first, _, gates, _ = [lowered.matrix(node) for node in lowered.calls(OPERATORS.linear)][:4]
    attention = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
    assert torch.equal(first, torch.cat([linear.weight for linear in attention]))
    assert torch.equal(gates, torch.cat((layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight)))


# The drafter


def draft_arguments(step: StepModule, extent: int) -> list[Tensor]:
    """A root at position 11 with the token before it, over an empty tree, and a path that may be copied."""
    flat = example_inputs(step, {"W": 2, "S": extent, "R": 1, "A": SHAPE.draft_width})
    table = identity_table(LIMITS.num_children, LIMITS.num_knots)
    tokens, path = torch.randint(0, toy.VOCAB_SIZE, (2,)), torch.randint(0, toy.VOCAB_SIZE, (LIMITS.max_nodes,))
    path[0] = tokens[1]
    values = {
        "tokens": tokens,
        "tree_tokens": torch.where(torch.arange(LIMITS.max_nodes) == 0, path, 0),
        "copied_tokens": path,
        "copied_log_a": torch.full((LIMITS.max_nodes,), -0.5),
        "positions": torch.tensor([10, 11]),
        "slots": torch.tensor([11, 12]),
        "num_visible": torch.tensor([11, 12]),
        "expand_rows": torch.tensor([1]),
        "root": torch.tensor([11, 12]),
        "tree_ancestors": torch.arange(LIMITS.max_nodes**2).view(LIMITS.max_nodes, -1) == 0,
        "pool_values": torch.full((LIMITS.pool_size,), -torch.inf),
        "acceptance_table": torch.tensor(table.log_a).view(table.num_ranks, table.num_knots),
    }
    return [values.get(spec.name, tensor) for spec, tensor in zip(step.inputs, flat, strict=True)]


@cache
def lowered_drafts(vocabulary: tuple[int, ...] | None) -> tuple[Lowered, Lowered]:
    """The draft pass and the fused draft of a tied, quantised drafter, each made from a model loaded for it."""
    lowered = []
    for depth in (None, SHAPE.draft_depth):
        model = toy.make_llama(6, num_hidden_layers=1, tie_word_embeddings=True)
        torch.manual_seed(7)
        affine = {"model.model.embed_tokens.weight": quantise(model.model.embed_tokens, 8)}
        if vocabulary is None:
            affine["model.lm_head.weight"] = affine["model.model.embed_tokens.weight"]
        step = draft_pass(model, toy.VOCAB_SIZE, LIMITS, vocabulary)
        if depth is not None:
            step = fused_draft(step, SHAPE.draft_width, depth)
        lowered.append(lower(step, affine))
    return lowered[0], lowered[1]


def quantise(layer: torch.nn.Module, bits: int) -> AffineWeights:
    """Random levels that become the layer's weights."""
    rows, features = layer.weight.shape
    levels = torch.randint(0, 2**bits, (rows, features), dtype=torch.uint8)
    scales = (torch.rand(rows, features // BLOCK) * 2**-bits + 2.0**-bits).half()
    affine = AffineWeights(levels, scales, (scales.float() * -(2 ** (bits - 1))).half(), bits)
    layer.weight.data.copy_(affine.values())
    return affine


@pytest.mark.parametrize("vocabulary", [None, KEPT])
def test_a_fused_draft_needs_only_constants_of_the_draft_pass(vocabulary):
    one_pass, fused = (constants(lowered.program)[0] for lowered in lowered_drafts(vocabulary))
    assert set(fused) <= set(one_pass)
    packed = {name for name, value in one_pass.items() if value.dtype == torch.uint8}
    assert packed <= set(fused) and len(packed) == (5 if vocabulary is None else 6)
    for name, value in fused.items():
        assert value.dtype == one_pass[name].dtype and torch.equal(value, one_pass[name])


@pytest.mark.parametrize("vocabulary", [None, KEPT])
def test_lowered_drafts_grow_the_traced_trees(vocabulary):
    for lowered in lowered_drafts(vocabulary):
        for seed, extent in ((8, 14 + SHAPE.capacity), (9, LIMITS.kv_rows - 1)):
            torch.manual_seed(seed)
            expected, found = run_both(lowered, draft_arguments(lowered.step, extent))
            assert_close(found, expected, 1e-5)


def test_an_embedding_of_levels_is_affine_beside_a_head_that_was_cut_from_it():
    for lowered in lowered_drafts(KEPT):
        tables, heads = lowered.calls(OPERATORS.embedding), lowered.calls(OPERATORS.linear)[4::5]
        assert {node.args[3] for node in tables} == {Format.AFFINE8}
        assert {node.args[2] for node in heads} == {len(KEPT)}
        assert {node.args[1] for node in heads}.isdisjoint(node.args[1] for node in tables)


def test_a_fused_draft_runs_the_products_once_for_each_pass():
    one_pass, fused = (len(lowered.calls(OPERATORS.linear)) for lowered in lowered_drafts(None))
    assert (one_pass, fused) == (5, 5 * SHAPE.draft_depth)


# Quantised checkpoints


def test_products_of_levels_are_affine_and_their_weights_unchanged():
    model = toy.make_llama(10, tie_word_embeddings=True)
    torch.manual_seed(11)
    first, second = model.model.layers
    head = quantise(model.lm_head, 8)
    affine = {"model.lm_head.weight": head, "model.model.embed_tokens.weight": head}
    for number, part, bits in (
        (0, "self_attn.q_proj", 4), (0, "self_attn.k_proj", 4), (0, "self_attn.v_proj", 4), (0, "self_attn.o_proj", 8),
        (0, "mlp.down_proj", 4), (1, "self_attn.q_proj", 4), (1, "self_attn.k_proj", 8), (1, "mlp.down_proj", 4),
    ):  # fmt: skip
        layer = model.model.layers[number].get_submodule(part)
        affine[f"model.model.layers.{number}.{part}.weight"] = quantise(layer, bits)
    second.mlp.down_proj.weight.data[3, 5] += 1e-3  # no longer what its levels say

    expected = [
        (Format.AFFINE4, (first.self_attn.q_proj, first.self_attn.k_proj, first.self_attn.v_proj)),
        (Format.AFFINE8, (first.self_attn.o_proj,)),
        (Format.FLOAT32, (first.mlp.gate_proj, first.mlp.up_proj)),
        (Format.AFFINE4, (first.mlp.down_proj,)),
        (Format.AFFINE4, (second.self_attn.q_proj,)),  # three kinds of weights: three products
        (Format.AFFINE8, (second.self_attn.k_proj,)),
        (Format.FLOAT32, (second.self_attn.v_proj,)),
        (Format.FLOAT32, (second.self_attn.o_proj,)),
        (Format.FLOAT32, (second.mlp.gate_proj, second.mlp.up_proj)),
        (Format.FLOAT32, (second.mlp.down_proj,)),
        (Format.AFFINE8, (model.lm_head,)),
    ]
    lowered = lower(verify_step(model, toy.VOCAB_SIZE, LIMITS), affine)
    products = {lowered.matrix(node): node for node in lowered.calls(OPERATORS.linear)}
    assert len(products) == len(expected)
    for kind, layers in expected:
        weights = torch.cat([layer.weight for layer in layers])
        (node,) = [node for matrix, node in products.items() if torch.equal(matrix, weights)]
        assert node.args[3] == kind
    (table,) = lowered.calls(OPERATORS.embedding)
    assert table.args[3] == Format.AFFINE8
    assert table.args[1] in [node.args[1] for node in products.values()]
    torch.manual_seed(12)
    traced, found = run_both(lowered, verify_arguments(lowered.step, 7, 30))
    assert_close(found, traced, 1e-5)
