"""From a traced step to one with fewer and larger products: linears with a common input become one.

For the CPU it then calls our kernels over packed weights instead of parameters, and a matrix that serves both as
embedding and as output layer is packed once; elsewhere products stay torch's, of matrices laid below one another.
Invariant: the values computed are those of the traced graph, up to the order of summation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from yggc.kernels import OPERATORS
from yggc.packing import AffineWeights, PackedMatrix, pack
from yggrt.artifacts import ROWS_PREFIX

ATEN = torch.ops.aten
PACKABLE = (torch.float32, torch.bfloat16)


@dataclass(slots=True)
class _Product:
    """One linear of the graph: `node` is inputs x matrix + bias.

    matrix: [N, K]. key: the parameter's memory, and whether it lies turned there.
    """

    node: fx.Node
    inputs: fx.Node
    bias: fx.Node | None
    matrix: Tensor
    affine: AffineWeights | None
    key: tuple[int, bool]


class _Weights:
    """The parameters of a program, and the buffers that take their place."""

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self.graph: fx.Graph = program.graph_module.graph
        signature = program.graph_signature
        self.targets = {
            spec.arg.name: spec.target
            for spec in signature.input_specs
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER)
        }
        self.names: dict[int, str] = {}  # of parameters, by their memory
        for name, value in sorted(program.state_dict.items(), reverse=True):
            self.names[value.data_ptr()] = name

    def parameter(self, node: object) -> tuple[str, Tensor] | None:
        """Name and value of the parameter that a node stands for."""
        if not isinstance(node, fx.Node) or node.name not in self.targets:
            return None
        name = self.targets[node.name]
        value = self.program.state_dict.get(name)
        return None if value is None or value.dim() != 2 or value.dtype not in PACKABLE else (name, value)

    def add_buffer(self, name: str, value: Tensor) -> fx.Node:
        """The placeholder of a new buffer."""
        first = next(node for node in self.graph.nodes if node.op == "placeholder")
        with self.graph.inserting_before(first):
            node = self.graph.placeholder(name)
        mode = first.meta["val"].fake_mode if isinstance(first.meta.get("val"), torch._subclasses.FakeTensor) else None
        node.meta["val"] = mode.from_tensor(value) if mode is not None else value
        specs = self.program.graph_signature.input_specs
        specs.insert(0, InputSpec(InputKind.BUFFER, TensorArgument(node.name), name, persistent=True))
        self.program.state_dict[name] = value
        return node


class _Packer(_Weights):
    """Adds packed matrices to a program, each group of parameters once."""

    def __init__(self, program: ExportedProgram, affine: dict[str, AffineWeights], exactly: bool) -> None:
        super().__init__(program)
        self.affine, self.exactly = affine, exactly
        self._packed: dict[tuple[tuple[int, bool], ...], tuple[fx.Node, PackedMatrix]] = {}

    def packed(self, products: list[_Product], prefix: str = "packed_") -> tuple[fx.Node, PackedMatrix]:
        """The buffer that holds these products' matrices below one another; prefix: of its name, if it is new."""
        key = tuple(product.key for product in products)
        if key not in self._packed:
            matrix = pack(torch.cat([product.matrix for product in products]), _joined(products), self.exactly)
            name = re.sub(r"\W", "_", f"{prefix}{self.names[key[0][0]]}_{len(key)}")
            self._packed[key] = (self.add_buffer(name, matrix.data), matrix)
        return self._packed[key]


def _joined(products: list[_Product]) -> AffineWeights | None:
    parts = [product.affine for product in products]
    if any(part is None for part in parts) or len({part.bits for part in parts if part is not None}) != 1:
        return None
    known = [part for part in parts if part is not None]
    return AffineWeights(
        torch.cat([part.levels for part in known]),
        torch.cat([part.scales for part in known]),
        torch.cat([part.offsets for part in known]),
        known[0].bits,
    )


def lower_to_kernels(
    program: ExportedProgram, affine: dict[str, AffineWeights], exactly: bool = True
) -> ExportedProgram:
    """Replace linears and embeddings by kernels over packed weights; parameters nobody reads any more are dropped.

    affine:  by parameter name, the levels that a quantised checkpoint was read from.
    exactly: whether they must give the parameters' values; where not, the values change a little.
    """
    packer = _Packer(program, affine, exactly)
    for group in _groups(packer, affine):
        weights, matrix = packer.packed(group)
        _replace_products(packer, group, OPERATORS.linear, weights, matrix.rows, int(matrix.format))
    for node in list(packer.graph.nodes):
        if node.target is ATEN.embedding.default:
            _replace_embedding(packer, node)
        elif node.target is ATEN.scaled_dot_product_attention.default:
            _replace_attention(packer.graph, node)
    _drop_unread(program)
    packer.graph.lint()
    program.graph_module.recompile()
    return program


def merge_products(program: ExportedProgram) -> ExportedProgram:
    """Make one product of linears with a common input; their parameters become parts of one matrix, in its memory."""
    weights = _Weights(program)
    merged: dict[tuple[tuple[int, bool], ...], fx.Node] = {}
    for group in _groups(weights, {}):
        if len(group) == 1 or any(turned for _, turned in (product.key for product in group)):
            continue
        key = tuple(product.key for product in group)
        if key not in merged:
            matrix, name = torch.cat([product.matrix.detach() for product in group]), weights.names[key[0][0]]
            merged[key] = weights.add_buffer(re.sub(r"\W", "_", f"merged_{name}_{len(key)}"), matrix)
            for product, part in zip(group, matrix.split([len(each.matrix) for each in group]), strict=True):
                product.matrix.data = part
        _replace_products(weights, group, ATEN.linear.default, merged[key])
    _drop_unread(program)
    weights.graph.lint()
    program.graph_module.recompile()
    return program


def _groups(packer: _Weights, affine: dict[str, AffineWeights]) -> Iterable[list[_Product]]:
    """The linears of the graph, those with the same input together where one format holds them all."""
    groups: dict[tuple[fx.Node, str], list[_Product]] = {}
    for node in packer.graph.nodes:
        product = _product(packer, node, affine)
        if product is not None:
            kind = "plain" if product.affine is None else f"affine{product.affine.bits}"
            groups.setdefault((product.inputs, kind), []).append(product)
    return groups.values()


def _product(packer: _Weights, node: fx.Node, affine: dict[str, AffineWeights]) -> _Product | None:
    """A node as a product with a parameter, or None when it is none: `linear`, or GPT-2's `addmm` with [K, N]."""
    if node.op != "call_function":
        return None
    if node.target is ATEN.linear.default:
        inputs, weight, bias, turned = node.args[0], node.args[1], node.args[2] if len(node.args) > 2 else None, False
    elif node.target is ATEN.addmm.default and not node.kwargs:
        bias, inputs, weight = node.args
        turned = True
    else:
        return None
    found = packer.parameter(weight)
    if found is None or not isinstance(inputs, fx.Node) or inputs.meta["val"].dtype != found[1].dtype:
        return None
    name, value = found
    levels = None if turned else affine.get(name)
    matrix = value.t() if turned else value
    return _Product(
        node, inputs, bias if isinstance(bias, fx.Node) else None, matrix, levels, (value.data_ptr(), turned)
    )


def _replace_products(packer: _Weights, group: list[_Product], operator: Any, *arguments: Any) -> None:
    """One call of an operator on the group's input and these arguments, in place of its linears."""
    graph, first = packer.graph, group[0]
    with graph.inserting_after(first.inputs if first.inputs.op != "placeholder" else first.node.prev):
        product = graph.call_function(operator, (first.inputs, *arguments))
    begin = 0
    for part in group:
        end = begin + part.matrix.shape[0]
        with graph.inserting_before(part.node):
            result = product
            if len(group) > 1:
                result = graph.call_function(ATEN.slice.Tensor, (product, -1, begin, end))
            if part.bias is not None:
                result = graph.call_function(ATEN.add.Tensor, (result, part.bias))
        part.node.replace_all_uses_with(result)
        result.meta.update(part.node.meta)
        graph.erase_node(part.node)
        begin = end


def _replace_embedding(packer: _Packer, node: fx.Node) -> None:
    found = packer.parameter(node.args[0])
    if found is None:
        return
    name, value = found
    table = _Product(node, node, None, value, packer.affine.get(name), (value.data_ptr(), False))
    weights, matrix = packer.packed([table], ROWS_PREFIX)
    narrow = value.dtype == torch.bfloat16
    with packer.graph.inserting_before(node):
        rows = packer.graph.call_function(
            OPERATORS.embedding, (node.args[1], weights, matrix.features, int(matrix.format), narrow)
        )
    rows.meta.update(node.meta)
    node.replace_all_uses_with(rows)
    packer.graph.erase_node(node)


def _replace_attention(graph: fx.Graph, node: fx.Node) -> None:
    """queries [1, heads, W, dim], keys and values [1, kv_heads, S, dim], mask [1, 1, W, S] -> [1, heads, W, dim]."""
    queries, keys, values, mask = node.all_input_nodes[:4]
    dim = queries.meta["val"].shape[-1]
    scale = node.kwargs.get("scale")
    with graph.inserting_before(node):
        parts = [graph.call_function(ATEN.select.int, (part, 0, 0)) for part in (queries, keys, values, mask)]
        parts[3] = graph.call_function(ATEN.select.int, (parts[3], 0, 0))
        rows = graph.call_function(OPERATORS.attention, (*parts, dim**-0.5 if scale is None else scale))
        turned = graph.call_function(ATEN.transpose.int, (rows, 0, 1))
        result = graph.call_function(ATEN.unsqueeze.default, (turned, 0))
    result.meta.update(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _drop_unread(program: ExportedProgram) -> None:
    """Remove parameters and buffers that no node reads, with their placeholders."""
    signature, graph = program.graph_signature, program.graph_module.graph
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    kept = []
    for spec in signature.input_specs:
        node = nodes.get(getattr(spec.arg, "name", ""))
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and node is not None and not node.users:
            graph.erase_node(node)
            program.state_dict.pop(spec.target, None)
        else:
            kept.append(spec)
    signature.input_specs[:] = kept
